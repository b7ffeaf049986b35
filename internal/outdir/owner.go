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

// ownerFile is the name of the file that names the owner of a folder.
const ownerFile = ".owner.json"

// beat is the interval at which an owner renews the time of its file. patience is how long a
// process on another host waits for a renewal before it treats the owner as dead; all hosts have
// the same value. settle is how long a contender waits if the file may be in a short intermediate
// state: half-written, or locked by another contender that inspects it. Tests shorten these times.
var (
	beat     = 10 * time.Second
	patience = 60 * time.Second
	settle   = time.Second
)

// Owner is the exclusive right of this process to write into a folder. It ends with Release or
// Undo, or when another process finds this process dead. The folder has a file that names the
// process, with a lock (flock) on it if the file system has locks. One rank of a job holds the
// Owner.
type Owner struct {
	// Before is the record of an unfinished run whose process is dead; nil if there is none.
	Before *Record

	dir, path string
	self      Record
	file      *os.File
	info      fs.FileInfo
	made      []string // folders that Take has created, the outermost first
	stop      chan struct{}
	beating   sync.WaitGroup
}

// Take makes this process the owner of a folder, which it creates if necessary. If another process
// owns the folder, the error names that owner. Take calls wait when the owner may be dead but its
// process cannot be seen; Take then waits for a renewal of the owner file.
//
// If several processes call Take at the same time, exactly one succeeds. A killed process is no
// longer an owner: on its own host the kernel releases its lock, and elsewhere its file is no
// longer renewed. A requeued Slurm job takes over from its earlier start at once.
func Take(dir string, self Record, wait func(text string)) (*Owner, error) {
	made, err := mkdirAll(dir)
	if err != nil {
		return nil, err
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

// Abandon removes the files that an unfinished Take may have created in a folder. It is for a
// process that is about to exit.
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

// create writes and locks the owner file under a temporary name and links it to ownerFile, so the
// file appears complete. It returns false if another process's file has that name.
func (o *Owner) create() (ours bool, err error) {
	if o.Before != nil {
		// kept until Identify: if this process is killed before, the unfinished run is still known
		o.self.Run = o.Before.Run
	}
	temp := o.path + "." + o.self.Token
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return false, err
	}
	defer os.Remove(temp)
	o.file = f
	o.self.Locked, _ = lockFile(f) // without locks only the name decides
	if err = o.write(); err == nil {
		o.info, err = f.Stat()
	}
	if err == nil {
		err = os.Link(temp, o.path)
		at, statErr := os.Lstat(o.path)
		switch {
		case err == nil, statErr == nil && os.SameFile(at, o.info): // NFS may report a failure for a link that it made
			return true, nil
		case statErr == nil || errors.Is(err, fs.ErrExist): // another process's file, which may be gone by now
			err = nil
		case errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.ENOSYS):
			// the file system has no hard links
			f.Close()
			return o.createPlain()
		}
	}
	f.Close()
	return false, err
}

// createPlain is create for file systems without hard links. Other processes may see the file
// before it is written and locked; they wait.
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

// Requeued reports whether the unfinished run is of an earlier start of this Slurm job.
func (o *Owner) Requeued() bool { return o.Before != nil && o.Before.requeued(&o.self) }

// Identify records the identity of the run. A later process with the same identity may restart the
// run if it ended without a checkpoint.
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
				os.Chtimes(o.path, now, now) // a failure is repaired by the next renewal
			}
		}
	}
}

// Held returns an error if this process no longer owns the folder: the folder was removed or
// replaced, or another process took over.
func (o *Owner) Held() error {
	at, err := os.Lstat(o.path)
	if err == nil && os.SameFile(at, o.info) {
		return nil
	}
	if f, openErr := os.Open(o.path); openErr == nil {
		defer f.Close()
		if r := readRecord(f); r != nil && r.Token != o.self.Token {
			return status.Errorf(status.IO,
				"output.dir: %s was taken over by the %v while this job ran; give each job an output.dir of its own",
				o.dir, r)
		}
	}
	return status.Errorf(status.IO,
		"output.dir: %s was removed or replaced while the job ran, and results are lost with it; run the job again, and leave the folder in place until it ends",
		o.dir)
}

// Release ends the ownership. After a finished run it removes the owner file. After an unfinished
// run the record stays, so the same run can be restarted. It returns the error of Held.
func (o *Owner) Release(finished bool) error {
	return o.leave(func() error {
		if finished {
			return os.Remove(o.path)
		}
		o.self.Ended = true
		return o.write()
	})
}

// Undo ends the ownership and restores the state before Take. It is for a job that has written
// nothing, or whose results belong to no run.
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
	defer o.file.Close() // closing releases the lock
	if err := o.Held(); err != nil {
		return err
	}
	if err := last(); err != nil {
		return status.Errorf(status.IO, "output.dir: %s: %w; remove the file", o.path, err)
	}
	return nil
}

// mkdirAll is os.MkdirAll, and returns the folders that it has created.
func mkdirAll(dir string) (made []string, err error) {
	for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
		if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) || filepath.Dir(at) == at {
			break
		}
		if to, err := os.Readlink(at); err == nil {
			return nil, status.Errorf(status.IO,
				"output.dir: %s is a symbolic link to %s, which does not exist; make that folder, or remove the link",
				at, to)
		}
		made = append([]string{at}, made...)
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, status.Errorf(status.IO, "output.dir: %w; choose a folder that can be written", err)
	}
	return made, nil
}

// unmake removes the folders that mkdirAll created, if they are empty.
func (o *Owner) unmake() {
	for i := len(o.made) - 1; i >= 0; i-- {
		if os.Remove(o.made[i]) != nil {
			return
		}
	}
}
