package tensor

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"

	"ulysses/internal/status"
)

// Item is a tensor to write: a dense tensor in host memory, or a type and shape and a function that
// writes the bytes.
type Item struct {
	Name   string
	Tensor Tensor
	Write  func(w io.Writer) error // nil = the memory of Tensor is written
}

// WriteSafetensors writes a file of the safetensors format, completely or not at all, see
// WriteFile. Items are written in the given order.
func WriteSafetensors(path string, metadata map[string]string, items []Item) (err error) {
	header, err := safetensorsHeader(metadata, items)
	if err != nil {
		return status.Errorf(status.Internal, "%s: %w", path, err)
	}
	return WriteFile(path, func(w io.Writer) error {
		if _, err := w.Write(header); err != nil {
			return err
		}
		for _, it := range items {
			n := &counter{w: w}
			if it.Write != nil {
				err = it.Write(n)
			} else if it.Tensor.Numel() > 0 {
				_, err = n.Write(it.Tensor.RawBytes())
			}
			if err == nil && n.bytes != it.Tensor.Bytes() {
				err = fmt.Errorf("%d bytes were written, %v has %d", n.bytes, it.Tensor, it.Tensor.Bytes())
			}
			if err != nil {
				return fmt.Errorf("tensor %s: %w", it.Name, err)
			}
		}
		return nil
	})
}

func safetensorsHeader(metadata map[string]string, items []Item) ([]byte, error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	table := make(map[string]any, len(items)+1)
	if len(metadata) > 0 {
		table["__metadata__"] = metadata
	}
	at := int64(0)
	for _, it := range items {
		if _, twice := table[it.Name]; twice {
			return nil, fmt.Errorf("tensor %s is written twice", it.Name)
		}
		shape := it.Tensor.Dims()
		if shape == nil {
			shape = []int64{}
		}
		table[it.Name] = entry{it.Tensor.DType.String(), shape, [2]int64{at, at + it.Tensor.Bytes()}}
		at += it.Tensor.Bytes()
	}
	text, err := json.Marshal(table)
	if err != nil {
		return nil, err
	}
	for len(text)%8 != 0 { // the data is aligned to 8 bytes, as by the format's reference writer
		text = append(text, ' ')
	}
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), nil
}

// WriteFile writes a file completely or not at all: write fills a temporary file in the same
// folder, which is flushed to disk and then renamed to path. An error of write that has a status is
// returned as it is.
func WriteFile(path string, write func(w io.Writer) error) (err error) {
	path = Target(path)
	var f *os.File
	temp, err := Beside(path, func(name string) (err error) {
		f, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	if err != nil {
		return status.Errorf(status.IO, "%s: cannot be written: %w", path, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			Discard(temp)
			// An error of write with a status is of the contents, not of the file.
			if content := (*status.Error)(nil); !errors.As(err, &content) {
				err = status.Errorf(status.IO, "%s: cannot be written: %w", path, err)
			}
		}
	}()
	w := bufio.NewWriterSize(&flushing{f: f}, 1<<20)
	if err = write(w); err != nil {
		return err
	}
	if err = w.Flush(); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return Finish(temp, func() error { return os.Rename(temp, path) })
}

// flushing flushes a file to disk each GiB. Otherwise the machine might keep a whole model in
// memory and write it at the end, in one call that may take minutes, for which other ranks would
// wait.
type flushing struct {
	f interface {
		io.Writer
		Sync() error
	}
	bytes int64 // since the last flush
}

func (w *flushing) Write(p []byte) (n int, err error) {
	n, err = w.f.Write(p)
	if w.bytes += int64(n); w.bytes >= 1<<30 && err == nil {
		w.bytes, err = 0, w.f.Sync()
	}
	return n, err
}

// Target returns the path to write for a path that may be a symbolic link: its target is replaced,
// not the link. The target need not exist.
func Target(path string) string {
	for range 40 { // as many links as Linux follows
		if real, err := filepath.EvalSymlinks(path); err == nil {
			return real
		}
		to, err := os.Readlink(path)
		if err != nil {
			break
		}
		if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil && !filepath.IsAbs(to) {
			to = filepath.Join(dir, to)
		}
		path = to
	}
	return path
}

// Beside creates a file or folder under a temporary name in the folder of path, and returns that
// name. Finish or Discard must follow. create must return fs.ErrExist if the name exists. The new
// file has the mode that the umask leaves; os.CreateTemp would give access to the owner only.
func Beside(path string, create func(name string) error) (string, error) {
	for {
		name := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%08x", filepath.Base(path), rand.Uint32()))
		unfinished.Lock()
		err := create(name)
		if err == nil {
			unfinished.names[name] = true
		}
		unfinished.Unlock()
		if !errors.Is(err, fs.ErrExist) {
			return name, err
		}
	}
}

// counter counts the bytes that are written to w.
type counter struct {
	w     io.Writer
	bytes int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.bytes += int64(n)
	return n, err
}
