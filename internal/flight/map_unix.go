//go:build unix

package flight

import (
	"os"
	"syscall"
	"unsafe"
)

// mapping is a file that is mapped into memory.
type mapping struct{ mem []byte }

func mapFile(path string, size int) (*mapping, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// Writing instead of truncating: a full disk is an error here, and not a signal at the first
	// access to the memory.
	if _, err := f.Write(make([]byte, size)); err != nil {
		return nil, err
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, &os.PathError{Op: "mmap", Path: path, Err: err}
	}
	return &mapping{mem}, nil
}

func (m *mapping) sync() {
	syscall.Syscall(syscall.SYS_MSYNC, uintptr(unsafe.Pointer(&m.mem[0])), uintptr(len(m.mem)),
		uintptr(syscall.MS_SYNC))
}

func (m *mapping) close() { syscall.Munmap(m.mem) }
