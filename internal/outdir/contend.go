package outdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"ulysses/internal/status"
)

// inspect examines the owner file of another process. It returns nil if the name is free or may be
// free, and create decides then. Otherwise it returns the refusal.
func (o *Owner) inspect(wait func(string)) error {
	for began := time.Now(); ; time.Sleep(settle / 100) {
		f, err := os.OpenFile(o.path, os.O_RDWR|syscall.O_NOFOLLOW, 0)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case errors.Is(err, syscall.ELOOP):
			return status.Errorf(status.IO, "output.dir: %s is a symbolic link; remove it", o.path)
		case err != nil:
			return status.Errorf(status.IO,
				"output.dir: %w; choose another output.dir, or remove the file if its job has ended", err)
		}
		retry, err := o.judge(f, time.Since(began), wait)
		f.Close()
		if !retry {
			return err
		}
	}
}

// judge decides on an open owner file: the owner is dead and the file is removed, or the folder is
// refused, or the caller must look again. looked is the time since the first look.
func (o *Owner) judge(f *os.File, looked time.Duration, wait func(string)) (retry bool, err error) {
	locked, lockErr := lockFile(f)
	free, last := locked || lockErr != nil, looked > settle
	info, err := f.Stat()
	if err != nil || !o.named(info) {
		return !last, o.refuse(nil, "is replaced again and again")
	}
	r := readRecord(f)
	if r == nil { // half-written, or written by another program
		if !last || !locked {
			return !last, o.refuse(nil, "cannot be read")
		}
		return false, o.remove(info, &Record{})
	}
	state := r.seen(&o.self)
	switch {
	case r.Ended && free:
	case locked && r.Locked && r.Boot != "" && r.Boot == o.self.Boot: // the kernel released the owner's lock
	case state == alive && !last, state == dying && looked < patience: // it may have been killed a moment ago
		return true, nil
	case state == alive, state == dying:
		return false, o.refuse(r, "")
	case !free && !last: // locked by the owner, or briefly by another contender
		return true, nil
	case r.requeued(&o.self): // the lock of a dead node may still be held
	case !free:
		return false, o.refuse(r, "")
	case state == dead:
	default:
		if o.renewed(info, r, wait) {
			return false, o.refuse(r, "")
		}
	}
	return false, o.remove(info, r)
}

// renewed waits for the time in which a live owner renews its file, and reports whether the owner
// has renewed it.
func (o *Owner) renewed(info fs.FileInfo, r *Record, wait func(string)) bool {
	wait(fmt.Sprintf("output.dir: %s was in use by the %v, whose process cannot be seen from here; waiting %v for it to renew its file",
		o.dir, r, patience))
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(patience / 60) {
		f, err := os.Open(o.path) // opening makes NFS fetch the server's attributes
		if err != nil {
			return false // the file is gone: create decides
		}
		now, err := f.Stat()
		f.Close()
		if err == nil && (!now.ModTime().Equal(info.ModTime()) || !os.SameFile(now, info)) {
			return true
		}
	}
	return false
}

// remove deletes the file of a dead owner. If another process has already deleted it and put its
// own file there, that file stays.
func (o *Owner) remove(info fs.FileInfo, r *Record) error {
	stale := o.path + ".stale." + o.self.Token
	if err := os.Rename(o.path, stale); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return status.Errorf(status.IO, "output.dir: %w; choose another output.dir", err)
	}
	defer os.Remove(stale)
	if got, err := os.Lstat(stale); err != nil || !os.SameFile(got, info) {
		// fails if a third process has become the owner; the owner whose file was moved here learns
		// it from Held
		os.Link(stale, o.path)
		return nil
	}
	if o.Before = r; r.Run == "" {
		o.Before = nil
	}
	return nil
}

// named reports whether the file is still the one at o.path.
func (o *Owner) named(info fs.FileInfo) bool {
	at, err := os.Lstat(o.path)
	return err == nil && os.SameFile(at, info)
}

// refuse returns the error that names the owner and the fix. r is nil if the owner is unknown.
func (o *Owner) refuse(r *Record, why string) error {
	if r == nil {
		return status.Errorf(status.IO,
			"output.dir: %s is in use, and %s %s; choose another output.dir, or remove that file if no job runs", o.dir,
			o.path, why)
	}
	return status.Errorf(status.IO,
		"output.dir: %s is in use by the %v; choose another output.dir, or wait until that job has ended", o.dir, r)
}

// lockFile is flock. Tests replace it to simulate a file system without locks.
var lockFile = flock

// flock locks a file unless another process has locked it. An error means that the file system has
// no locks. The kernel releases the lock when the file's last descriptor is closed, also if the
// process is killed.
func flock(f *os.File) (locked bool, err error) {
	for {
		switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err {
		case nil:
			return true, nil
		case syscall.EINTR:
		case syscall.EWOULDBLOCK:
			return false, nil
		default:
			return false, err
		}
	}
}
