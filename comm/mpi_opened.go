//go:build !mpi

package comm

/*
#include <stdlib.h>
#include "mpi_bridge.h"
*/
import "C"

import (
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"ulysses/internal/status"
)

// The table is a file, one for each MPI library, that is opened when a host program's communicator
// comes.

// Available reports whether this program was built with MPI.
func Available() bool { return false }

// World is all processes of an MPI job; here it is refused.
func World() (Comm, error) {
	return nil, status.Errorf(status.Unsupported, "comm.World: this program was built without MPI: build it with -tags mpi, or run ranks in one process with --ranks")
}

const (
	mpiVariable   = "ULYSSES_MPI_SHIM"
	mpiTextLength = 1024
)

// mpiLibraries lists the MPI libraries whose handles and constants differ, hence one file each.
var mpiLibraries = []struct {
	file     string
	launcher string   // a variable that its launcher sets
	says     []string // in the text of MPI_Get_library_version
}{
	{"libulysses_mpi_ompi.so", "OMPI_COMM_WORLD_SIZE", []string{"Open MPI"}},
	// one binary interface
	{"libulysses_mpi_mpich.so", "PMI_SIZE", []string{"MPICH", "Intel(R) MPI", "MVAPICH"}},
}

// loadMPI opens the file that ULYSSES_MPI_SHIM names, else that of the MPI library which this
// process has in memory, else of the launcher's, else any: beside the library that this code is in
// or the program, in lib beside their folders, or where the system's loader looks. mpiStart is
// locked.
func loadMPI() error {
	if mpiStart.loaded {
		return nil
	}
	present := presentMPI()
	files, err := shimFiles(present)
	if err != nil {
		return err
	}
	var missing error
	for _, f := range files {
		path, found := findShim(f)
		err := openShim(path)
		switch {
		case err == nil:
			return fitsMPI(path, present)
		case found:
			return err
		case missing == nil:
			missing = err
		}
	}
	if !strings.Contains(missing.Error(), "cannot open shared object file") {
		return missing
	}
	return status.Errorf(status.Unsupported, "comm.FromMPI: %s is not beside this library or program, in lib beside its folder, or where the system's loader looks, "+
		"or its MPI library is not: build it with make mpi-shim, name the file in %s, or give the host program's own collectives instead: %w",
		strings.Join(files, ", "), mpiVariable, missing)
}

// shimFiles lists the files to try, best first. A path has a slash.
func shimFiles(present string) ([]string, error) {
	if path := os.Getenv(mpiVariable); path != "" {
		path, err := filepath.Abs(path)
		if _, statErr := os.Stat(path); err != nil || statErr != nil {
			return nil, status.Errorf(status.InvalidArgument, "%s=%s: no such file: name a %s or its like, or unset it", mpiVariable, path, mpiLibraries[0].file)
		}
		return []string{path}, nil
	}
	var first, rest []string
	for _, l := range mpiLibraries {
		if present != "" {
			if says(present, l.says) {
				return []string{l.file}, nil
			}
		} else if os.Getenv(l.launcher) != "" {
			first = append(first, l.file)
		} else {
			rest = append(rest, l.file)
		}
	}
	if present != "" {
		return nil, status.Errorf(status.Unsupported, "comm.FromMPI: this process has the MPI library %q, of which nothing is known here: build libulysses_mpi for it "+
			"(make mpi-shim MPICC=its mpicc) and name the file in %s", firstWords(present), mpiVariable)
	}
	return append(first, rest...), nil
}

func says(text string, words []string) bool {
	for _, w := range words {
		if strings.Contains(text, w) {
			return true
		}
	}
	return false
}

// presentMPI is the text of the MPI library that this process has: visible to all, or mapped as a
// library of a plug-in's or a Python module's own; "" for none.
func presentMPI() string {
	if text, ok := askMPI(nil); ok {
		return text
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return ""
	}
	asked := map[string]bool{}
	for line := range strings.Lines(string(maps)) {
		_, path, ok := strings.Cut(strings.TrimSpace(line), "/")
		name := filepath.Base(path)
		if !ok || asked[path] || !strings.HasPrefix(name, "libmpi") || !strings.Contains(name, ".so") {
			continue
		}
		asked[path] = true
		c := C.CString("/" + path)
		text, ok := askMPI(c)
		C.free(unsafe.Pointer(c))
		if ok {
			return text
		}
	}
	return ""
}

func askMPI(path *C.char) (string, bool) {
	text := (*C.char)(C.malloc(mpiTextLength))
	defer C.free(unsafe.Pointer(text))
	ok := C.umpi_present(path, text, mpiTextLength) != 0
	return C.GoString(text), ok
}

// findShim looks where files lie that were installed together; what is not there is left to the
// loader, by its name.
func findShim(file string) (path string, found bool) {
	if strings.Contains(file, "/") {
		return file, true
	}
	var beside []string
	text := (*C.char)(C.malloc(mpiTextLength))
	defer C.free(unsafe.Pointer(text))
	if C.umpi_here(text, mpiTextLength) != 0 {
		beside = append(beside, C.GoString(text))
	}
	if program, err := os.Executable(); err == nil {
		beside = append(beside, program)
	}
	for _, b := range beside {
		if real, err := filepath.EvalSymlinks(b); err == nil {
			b = real
		}
		// a name without a folder is for the loader's path
		if whole, err := filepath.Abs(b); err == nil {
			b = whole
		}
		for _, path := range []string{filepath.Join(filepath.Dir(b), file), filepath.Join(filepath.Dir(b), "..", "lib", file)} {
			if _, err := os.Stat(path); err == nil {
				return path, true
			}
		}
	}
	return file, false
}

// Shims are the files of mpiLibraries that are there, by path. Nothing is opened.
func Shims() []string {
	paths := []string{}
	for _, l := range mpiLibraries {
		if path, found := findShim(l.file); found {
			paths = append(paths, path)
		}
	}
	return paths
}

func openShim(path string) error {
	name, text := C.CString(path), (*C.char)(C.malloc(mpiTextLength))
	defer C.free(unsafe.Pointer(name))
	defer C.free(unsafe.Pointer(text))
	var have C.uint32_t
	opened := C.umpi_open(name, text, mpiTextLength, &have) != 0
	why := C.GoString(text)
	switch {
	case opened:
		return nil
	case have != 0 && have != C.UMPI_ABI:
		return status.Errorf(status.Unsupported, "comm.FromMPI: %s speaks version %d of the interface, this library version %d: use the file that was built with it (make mpi-shim)",
			path, have, uint32(C.UMPI_ABI))
	case have != 0:
		return status.Errorf(status.Unsupported, "comm.FromMPI: %s does not fit this library, though both say version %d: it has %s: use the file that was built with it (make mpi-shim)",
			path, have, why)
	case why != "":
		return status.Errorf(status.Unsupported, "comm.FromMPI: %s cannot be opened: %s: build it on this system with make mpi-shim, or set LD_LIBRARY_PATH to the MPI library's folder", path, why)
	}
	return status.Errorf(status.Unsupported, "comm.FromMPI: %s is a library, but it has no function umpi_table: name a %s or its like in %s, or unset it", path, mpiLibraries[0].file, mpiVariable)
}

// fitsMPI refuses a table that stands on another MPI library than the one the host program uses:
// its handles mean nothing there.
func fitsMPI(path, present string) error {
	if name := libraryName(); present != "" && name != firstWords(present) {
		return status.Errorf(status.Unsupported, "comm.FromMPI: %s stands on %s, the host program on %s: build it for that (make mpi-shim MPICC=its mpicc) and name the file in %s",
			path, name, firstWords(present), mpiVariable)
	}
	mpiStart.loaded = true
	return nil
}
