package outdir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"ulysses/internal/status"
)

// ownerFile is the file in a folder that says who owns it.
const ownerFile = ".owner.json"

// beat is how often an owner renews the time of its file, and patience how long another host waits for that before it takes the owner for
// dead. All hosts have the same. settle is how long a contender waits where the state of the file may be that of a moment: just being
// written, or inspected by another contender. Tests shorten them.
var (
	beat     = 10 * time.Second
	patience = 60 * time.Second
	settle   = time.Second
)

// Owner is the right of this process to write into a folder, until it is released or another process finds it dead. It is a file in the
// folder that names the process, with a lock (flock) on it where the file system has locks. One rank of a job holds it.
type Owner struct {
	// Before is the record of a run that was not finished and whose process is dead; nil where there is none.
	Before *Record

	dir, path string
	self      Record
	file      *os.File
	info      fs.FileInfo
	made      []string // folders that Take has made, the outermost first
	stop      chan struct{}
	beating   sync.WaitGroup
}

// Take makes this process the owner of a folder, which is made if it does not exist. It fails with the name of the owner if another process
// owns it. wait is told when a dead owner is expected but cannot be looked at, so that Take waits for a sign of life.
//
// Of processes that call it at the same time exactly one succeeds. A process that was killed is no owner: on its own host the kernel
// releases its lock, and elsewhere its file is no longer renewed. A requeued Slurm job takes over from its earlier start at once.
func Take(dir string, self Record, wait func(text string)) (*Owner, error) {
	made, err := mkdirAll(dir)
	if err != nil {
		return nil, status.Errorf(status.IO, "output.dir: %w; choose a folder that can be written", err)
	}
	o := &Owner{dir: dir, path: filepath.Join(dir, ownerFile), self: self, made: made, stop: make(chan struct{})}
	if err := o.take(wait); err != nil {
		o.unmake()
		return nil, err
	}
	o.beating.Add(1)
	go o.renew()
	return o, nil
}

func (o *Owner) take(wait func(string)) error {
	for {
		ours, err := o.create()
		if err != nil {
			return status.Errorf(status.IO, "output.dir: %w; choose a folder that can be written", err)
		}
		if ours {
			return nil
		}
		if err := o.inspect(wait); err != nil {
			return err
		}
	}
}

// Abandon removes what a Take that has not returned may have made in a folder, for a process that ends at once.
func Abandon(dir string, self Record) {
	path := filepath.Join(dir, ownerFile)
	os.Remove(path + "." + self.Token)
	os.Remove(path + ".stale." + self.Token)
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	if r := readRecord(f); r != nil && r.Token == self.Token {
		os.Remove(path)
	}
}

// create writes the file of this process under a name of its own, locks it, and gives it the name that counts: it is there whole, or it is
// another's, which create reports with false.
func (o *Owner) create() (ours bool, err error) {
	if o.Before != nil {
		o.self.Run = o.Before.Run // kept until this run says what it is: a kill before that loses nothing
	}
	temp := o.path + "." + o.self.Token
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return false, err
	}
	defer os.Remove(temp)
	o.file = f
	o.self.Locked, _ = lockFile(f) // without locks the name alone decides
	if err = o.write(); err == nil {
		o.info, err = f.Stat()
	}
	if err == nil {
		err = os.Link(temp, o.path)
		at, statErr := os.Lstat(o.path)
		switch {
		case err == nil, statErr == nil && os.SameFile(at, o.info): // NFS may report a link as failed that was made
			return true, nil
		case statErr == nil || errors.Is(err, fs.ErrExist): // another's, which may be gone by now
			err = nil
		case errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.ENOSYS): // no hard links here
			f.Close()
			return o.createPlain()
		}
	}
	f.Close()
	return false, err
}

// createPlain is create for file systems without hard links: others may see the file before it is written and locked, and wait.
func (o *Owner) createPlain() (ours bool, err error) {
	o.file, err = os.OpenFile(o.path, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o666)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	o.self.Locked, _ = lockFile(o.file)
	if err = o.write(); err == nil {
		o.info, err = o.file.Stat()
	}
	if err != nil {
		os.Remove(o.path)
		o.file.Close()
	}
	return err == nil, err
}

// write puts the record into the file.
func (o *Owner) write() error {
	text := o.self.bytes()
	_, err := o.file.WriteAt(text, 0)
	if err == nil {
		err = o.file.Truncate(int64(len(text)))
	}
	if err == nil {
		err = o.file.Sync()
	}
	return err
}

// Identify records what a later process must run to go on with an unfinished run that has left no checkpoint.
func (o *Owner) Identify(run string) error {
	o.self.Run = run
	if err := o.write(); err != nil {
		return status.Errorf(status.IO, "output.dir: %s: %w; choose a folder that can be written", o.path, err)
	}
	return nil
}

// renew shows other hosts that this process is alive.
func (o *Owner) renew() {
	defer o.beating.Done()
	ticker := time.NewTicker(beat)
	defer ticker.Stop()
	for {
		select {
		case <-o.stop:
			return
		case now := <-ticker.C:
			if o.Held() == nil {
				os.Chtimes(o.path, now, now) // one that fails is made good by the next
			}
		}
	}
}

// Held returns an error when the folder is no longer this process's: it was removed, or another process took it.
func (o *Owner) Held() error {
	at, err := os.Lstat(o.path)
	if err == nil && os.SameFile(at, o.info) {
		return nil
	}
	if f, openErr := os.Open(o.path); openErr == nil {
		defer f.Close()
		if r := readRecord(f); r != nil && r.Token != o.self.Token {
			return status.Errorf(status.IO, "output.dir: %s was taken over by the %v while this job ran; give each job an output.dir of its own", o.dir, r)
		}
	}
	return status.Errorf(status.IO, "output.dir: %s was removed or replaced while the job ran, and results are lost with it; run the job again, and leave the folder in place until it ends", o.dir)
}

// Release gives the folder up. Of a finished run nothing stays; of another one the record stays, by which the same run can be started
// again. It returns what Held does.
func (o *Owner) Release(finished bool) error {
	return o.leave(func() error {
		if finished {
			return os.Remove(o.path)
		}
		o.self.Ended = true
		return o.write()
	})
}

// Undo gives the folder up as Take found it: for a job that has written nothing, or whose results are no run's.
func (o *Owner) Undo() error {
	return o.leave(func() error {
		if o.Before == nil {
			defer o.unmake()
			return os.Remove(o.path)
		}
		o.self = *o.Before
		o.self.Ended = true
		return o.write()
	})
}

func (o *Owner) leave(last func() error) error {
	close(o.stop)
	o.beating.Wait()
	defer o.file.Close() // and with it the lock
	if err := o.Held(); err != nil {
		return err
	}
	if err := last(); err != nil {
		return status.Errorf(status.IO, "output.dir: %s: %w; remove the file", o.path, err)
	}
	return nil
}

// mkdirAll is os.MkdirAll, and lists what it has made.
func mkdirAll(dir string) (made []string, err error) {
	for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
		if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) || filepath.Dir(at) == at {
			break
		}
		made = append([]string{at}, made...)
	}
	return made, os.MkdirAll(dir, 0o777)
}

// unmake removes folders that were made here, unless something lies in them.
func (o *Owner) unmake() {
	for i := len(o.made) - 1; i >= 0; i-- {
		if os.Remove(o.made[i]) != nil {
			return
		}
	}
}
