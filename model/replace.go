package model

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// temporary makes the folder in which the model of dir is written. It is beside dir, so that it
// replaces dir by a rename. It is inside dir if dir is a mount point, which cannot be renamed: the
// file system beside it may have no room. It is also inside dir if no folder can be made beside it,
// as in a container of which only dir can be written.
func temporary(dir string) (string, error) {
	mkdir := func(name string) error { return os.Mkdir(name, 0o777) }
	var err error
	volume := mounted(dir)
	if !volume {
		beside := ""
		if beside, err = tensor.Beside(dir, mkdir); err == nil {
			return beside, nil
		}
	}
	inside, insideErr := tensor.Beside(filepath.Join(dir, filepath.Base(dir)), mkdir)
	if volume || insideErr == nil {
		return inside, insideErr
	}
	return "", err
}

// mounted reports whether another file system is mounted at a folder. A folder of the same file
// system that is mounted there is not recognized; replace finds that it cannot be renamed.
func mounted(dir string) bool {
	at, err := os.Stat(dir)
	above, err2 := os.Stat(filepath.Join(dir, ".."))
	if err != nil || err2 != nil {
		return false
	}
	a, ok := at.Sys().(*syscall.Stat_t)
	b, ok2 := above.Sys().(*syscall.Stat_t)
	return ok && ok2 && a.Dev != b.Dev
}

// replace renames temp to dir. Files of the old dir that do not belong to its model are kept.
func replace(dir, temp string) error {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return status.Errorf(status.IO, "%s is a file; remove it or choose another folder", dir)
	}
	if filepath.Dir(temp) == dir {
		return replaceFiles(dir, temp)
	}
	old := temp + ".old"
	err := os.Rename(dir, old)
	if errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EXDEV) {
		// a mount point, or a folder of the image of a container, in the lower layer of overlayfs
		return replaceFiles(dir, temp)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return status.Errorf(status.IO, "%s cannot be replaced: %w", dir, err)
	}
	if err := os.Rename(temp, dir); err != nil {
		os.Rename(old, dir) // restore
		return status.Errorf(status.IO, "%s cannot be written: %w", dir, err)
	}
	if err != nil {
		return nil // dir did not exist
	}
	entries, err := os.ReadDir(old)
	if err != nil {
		return status.Errorf(status.IO, "%s is saved, but its other files could not be moved from %s: %w", dir,
			old, err)
	}
	for _, e := range entries {
		name := e.Name()
		if ofModel(e) {
			continue
		}
		if err := os.Rename(filepath.Join(old, name), filepath.Join(dir, name)); err != nil {
			return status.Errorf(status.IO, "%s is saved, but its file %s could not be moved from %s: %w", dir, name,
				old, err)
		}
	}
	if err := os.RemoveAll(old); err != nil {
		return status.Errorf(status.IO, "the previous %s could not be removed from %s: %w", dir, old, err)
	}
	return nil
}

// replaceFiles is replace for a folder that cannot be renamed: it replaces the files of its model.
// In the meantime dir has no configuration, so nothing loads a mixture of two models.
func replaceFiles(dir, temp string) error {
	failed := func(err error) error { return status.Errorf(status.IO, "%s cannot be written: %w", dir, err) }
	old, err := FilesIn(dir)
	if err != nil {
		return failed(err)
	}
	last := []string{configFile, AdapterConfigFile}
	for _, name := range append(last, old...) {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return failed(err)
		}
	}
	entries, err := os.ReadDir(temp)
	if err != nil {
		return failed(err)
	}
	for _, e := range entries {
		if !slices.Contains(last, e.Name()) {
			if err := move(filepath.Join(dir, e.Name()), filepath.Join(temp, e.Name())); err != nil {
				return failed(err)
			}
		}
	}
	for _, name := range last {
		err := move(filepath.Join(dir, name), filepath.Join(temp, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return failed(err)
		}
	}
	return os.RemoveAll(temp)
}

// move renames a file or a folder of files, or copies it to another file system.
func move(dst, src string) error {
	err := os.Rename(src, dst)
	if !errors.Is(err, syscall.EXDEV) {
		return err
	}
	return filepath.WalkDir(src, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		name, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		return copyTo(filepath.Join(dst, name), path)
	})
}

// copyTo copies a file. Unlike copyFile it may be called by a function of tensor.Finish, and an
// error leaves a part of the copy.
func copyTo(dst, src string) error {
	in, _, err := input.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(dst), 0o777); err != nil {
		return err
	}
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}
