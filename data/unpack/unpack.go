// Package unpack expands compressed files and Parquet files to a temporary file, which can be read
// at any offset.
//
// Open expands a file whose name ends in .gz, .zst or .parquet; endings may follow one another. The
// rows of a Parquet file become lines of JSON objects, in the order of the columns. The temporary
// file is in the folder for temporary files (TMPDIR) and has no name, so nothing is left behind.
//
// gzip cannot be read from the middle, zstd only at the borders of frames, and Parquet by row
// groups. A training order needs documents from everywhere in a file.
package unpack

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// A file may grow to maxGrowth times its size and minLimit bytes more. Text grows to about ten
// times its size. A hostile file could fill the disk.
const (
	maxGrowth = 2000
	minLimit  = 1 << 30
)

// endings are the endings of names that Open expands.
var endings = []string{".gz", ".zst", ".parquet"}

// Inner returns the name of a file without the endings that Open expands, with .jsonl in the place
// of .parquet. It returns false if there are none.
func Inner(path string) (string, bool) {
	packed := false
	for {
		ext := strings.ToLower(filepath.Ext(path))
		switch ext {
		case ".gz", ".zst":
			path, packed = path[:len(path)-len(ext)], true
		case ".parquet":
			return path[:len(path)-len(ext)] + ".jsonl", true
		default:
			return path, packed
		}
	}
}

// Open expands a file. fields are the columns to read of a Parquet file, if it has them. The
// caller closes the result.
func Open(path string, fields []string) (*os.File, error) {
	in, _, err := input.Open(path)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be opened: %w", path, err)
	}
	for name := path; ; {
		ext := strings.ToLower(filepath.Ext(name))
		if !isEnding(ext) {
			return in, nil
		}
		out, err := expand(in, ext, fields)
		in.Close()
		if err != nil {
			return nil, status.Errorf(status.Of(err), "%s: %w", path, err)
		}
		if ext == ".parquet" { // what is before it is a name, as for Inner
			return out, nil
		}
		in, name = out, name[:len(name)-len(ext)]
	}
}

func isEnding(ext string) bool {
	for _, e := range endings {
		if e == ext {
			return true
		}
	}
	return false
}

// expand writes the content of a file to a temporary file.
func expand(in *os.File, ext string, fields []string) (*os.File, error) {
	info, err := in.Stat()
	if err != nil {
		return nil, status.Errorf(status.IO, "cannot be read: %w", err)
	}
	out, err := os.CreateTemp("", "ulysses-data-*")
	if err != nil {
		return nil, noTemporary(err)
	}
	os.Remove(out.Name())
	w := &limited{out: out, left: maxGrowth*info.Size() + minLimit}
	switch ext {
	case ".gz":
		err = gunzip(w, in)
	case ".zst":
		err = unzstd(w, in)
	case ".parquet":
		err = parquetLines(w, in, info.Size(), fields)
	}
	if err == nil {
		return out, nil
	}
	out.Close()
	var failed *writeError
	if errors.As(err, &failed) {
		return nil, status.Errorf(status.IO,
			"the expanded data cannot be written to %s: %w; set TMPDIR to a folder with room", os.TempDir(),
			failed.error)
	}
	if status.Of(err) != status.Internal {
		return nil, err
	}
	return nil, status.Errorf(status.IO, "the file cannot be expanded: %w; write it again", err)
}

// noTemporary returns the error for a temporary file that cannot be made. Each stays open while the
// data are read, so many compressed files may exceed the limit of open files.
func noTemporary(err error) error {
	fix := "set TMPDIR to a folder with room"
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		fix = "each compressed file needs an open file: raise the limit (ulimit -n), or join files"
	}
	return status.Errorf(status.IO, "no temporary file for the expanded data: %w; %s", err, fix)
}

// limited writes to a file, up to a limit.
type limited struct {
	out  io.Writer
	left int64
}

// writeError is an error of writing, unlike errors of the data.
type writeError struct{ error }

func (w *limited) Write(b []byte) (int, error) {
	if w.left -= int64(len(b)); w.left < 0 {
		return 0, status.Errorf(status.Unsupported,
			"the file expands to more than %d times its size; expand it yourself", maxGrowth)
	}
	n, err := w.out.Write(b)
	if err != nil {
		err = &writeError{err}
	}
	return n, err
}

// gunzip expands the members of a gzip file. Zeros after a member, with which tapes and archives
// fill a block, are passed over, as by gzip and by Python.
func gunzip(w io.Writer, in io.Reader) error {
	buffered := bufio.NewReaderSize(in, 1<<16)
	r, err := gzip.NewReader(buffered)
	if err != nil {
		return fmt.Errorf("gzip: %w", err)
	}
	defer r.Close()
	for {
		r.Multistream(false)
		if _, err := io.Copy(w, r); err != nil {
			return err
		}
		b := byte(0)
		for b == 0 && err == nil {
			b, err = buffered.ReadByte()
		}
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = buffered.UnreadByte()
		}
		if err == nil {
			err = r.Reset(buffered)
		}
		if err != nil {
			return fmt.Errorf("gzip: %w", err)
		}
	}
}

// maxWindow is the largest window of a zstd file, in bytes.
const maxWindow = 256 << 20

func unzstd(w io.Writer, in io.Reader) error {
	r, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxWindow),
		zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return fmt.Errorf("zstd: %w", err)
	}
	defer r.Close()
	_, err = r.WriteTo(w)
	if errors.Is(err, zstd.ErrWindowSizeExceeded) {
		return status.Errorf(status.Unsupported,
			"zstd: the window has more than %d MiB; compress the file again with --long=28 or less, or expand it",
			maxWindow>>20)
	}
	return err
}
