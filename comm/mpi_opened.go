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
	"slices"
	"strings"
	"unsafe"

	"ulysses/internal/ownfile"
	"ulysses/internal/status"
)

// Without the tag mpi, the table is in a shared library ("shim"), one for each MPI library. FromMPI
// opens it.

// Available reports whether this program was built with MPI.
func Available() bool { return false }

// World returns an error: this program was built without MPI.
func World() (Comm, error) {
	return nil, status.Errorf(status.Unsupported,
		"comm.World: this program was built without MPI; build it with -tags mpi, or run all ranks in one process with --ranks")
}

const (
	mpiVariable   = "ULYSSES_MPI_SHIM"
	mpiTextLength = 1024
)

// mpiLibraries lists the shims. Each binary interface of MPI (handles, constants) needs its own.
var mpiLibraries = []struct {
	file     string
	launcher string   // an environment variable that its launcher sets
	names    []string // in the text of MPI_Get_library_version
}{
	{"libulysses_mpi_ompi.so", "OMPI_COMM_WORLD_SIZE", []string{"Open MPI"}},
	{"libulysses_mpi_mpich.so", "PMI_SIZE", []string{"MPICH", "Intel(R) MPI", "MVAPICH"}},
}

// loadMPI opens a shim. The first of these that applies selects the file: ULYSSES_MPI_SHIM, the MPI
// library that this process has loaded, the MPI library of the launcher, any shim. It searches the
// folder of the library that contains this code, the folder of the program, lib beside these two
// folders, and the system's library path. The caller holds the lock of mpiStart.
func loadMPI() error {
	if mpiStart.loaded {
		return nil
	}
	loaded := loadedMPI()
	files, err := shimFiles(loaded)
	if err != nil {
		return err
	}
	var missing error
	for _, f := range files {
		path, found := findShim(f)
		err := openShim(path)
		switch {
		case err == nil:
			return checkSameMPI(path, loaded)
		case found:
			return err
		case missing == nil:
			missing = err
		}
	}
	if !strings.Contains(missing.Error(), "cannot open shared object file") {
		return missing
	}
	return status.Errorf(status.Unsupported,
		"comm.FromMPI: %s or its MPI library was not found beside this library or program, in lib beside its folder, or on the system's library path: %w, or set %s to the file",
		strings.Join(files, ", "), missing, mpiVariable)
}

// shimFiles returns the files to try, in this order. loaded is the version text of the MPI library
// that this process has loaded; "" for none. A name without a slash is to be searched for.
func shimFiles(loaded string) ([]string, error) {
	if path := os.Getenv(mpiVariable); path != "" {
		path, err := filepath.Abs(path)
		if _, statErr := os.Stat(path); err != nil || statErr != nil {
			return nil, status.Errorf(status.InvalidArgument,
				"%s=%s: no such file; set it to the path of a file like %s, or unset it", mpiVariable, path,
				mpiLibraries[0].file)
		}
		return []string{path}, nil
	}
	var first, rest []string
	if file := shimOf(loaded); file != "" {
		return []string{file}, nil
	}
	for _, l := range mpiLibraries {
		if os.Getenv(l.launcher) != "" {
			first = append(first, l.file)
		} else {
			rest = append(rest, l.file)
		}
	}
	if loaded != "" {
		return nil, status.Errorf(status.Unsupported,
			"comm.FromMPI: this process has loaded the MPI library %q, for which there is no libulysses_mpi; build one "+
				"(make mpi-shim MPICC=its mpicc) and set %s to the file", firstWords(loaded), mpiVariable)
	}
	return append(first, rest...), nil
}

func containsAny(text string, words []string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(text, w) })
}

// loadedMPI returns the version text of the MPI library that this process has loaded, globally or
// as a private library of a plug-in or a Python module; "" for none.
func loadedMPI() string {
	if text, ok := queryVersion(nil); ok {
		return text
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return ""
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(maps)) {
		_, path, ok := strings.Cut(strings.TrimSpace(line), "/")
		name := filepath.Base(path)
		if !ok || seen[path] || !strings.HasPrefix(name, "libmpi") || !strings.Contains(name, ".so") {
			continue
		}
		seen[path] = true
		c := C.CString("/" + path)
		text, ok := queryVersion(c)
		C.free(unsafe.Pointer(c))
		if ok {
			return text
		}
	}
	return ""
}

// queryVersion calls MPI_Get_library_version of the loaded library at path, or of the global one.
func queryVersion(path *C.char) (string, bool) {
	text := (*C.char)(C.malloc(mpiTextLength))
	defer C.free(unsafe.Pointer(text))
	ok := C.umpi_loaded_library(path, text, mpiTextLength) != 0
	return C.GoString(text), ok
}

// findShim searches the folders in which the files are installed. If it does not find the file, it
// returns the name, for which the system's loader can search.
func findShim(file string) (path string, found bool) {
	if strings.Contains(file, "/") {
		return file, true
	}
	beside := []string{ownfile.Path()}
	if program, err := os.Executable(); err == nil {
		beside = append(beside, program)
	}
	for _, b := range beside {
		if b == "" {
			continue
		}
		if real, err := filepath.EvalSymlinks(b); err == nil {
			b = real
		}
		for _, path := range []string{filepath.Join(filepath.Dir(b), file),
			filepath.Join(filepath.Dir(b), "..", "lib", file)} {
			if _, err := os.Stat(path); err == nil {
				return path, true
			}
		}
	}
	return file, false
}

// Shims returns the paths of the files of mpiLibraries that exist. It opens none of them.
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
		return status.Errorf(status.Unsupported,
			"comm.FromMPI: %s has version %d of the interface, this library has version %d; use the file that was built with this library (make mpi-shim)",
			path, have, uint32(C.UMPI_ABI))
	case have != 0:
		return status.Errorf(status.Unsupported,
			"comm.FromMPI: %s does not fit this library, although both have version %d: it has %s; use the file that was built with this library (make mpi-shim)",
			path, have, why)
	case why != "":
		return status.Errorf(status.Unsupported,
			"comm.FromMPI: %s cannot be opened: %s; build it on this system with make mpi-shim, or set LD_LIBRARY_PATH to the MPI library's folder",
			path, why)
	}
	return status.Errorf(status.Unsupported,
		"comm.FromMPI: %s is a shared library without the function umpi_table; set %s to the path of a file like %s, or unset it",
		path, mpiVariable, mpiLibraries[0].file)
}

// checkSameMPI returns an error if the shim uses a different MPI library than the host program:
// handles of one library have no meaning in the other.
func checkSameMPI(path, loaded string) error {
	if name := shimLibrary(loaded); loaded != "" && name != firstWords(loaded) {
		return status.Errorf(status.Unsupported,
			"comm.FromMPI: %s uses %s, the host program uses %s; build it for that library (make mpi-shim MPICC=its mpicc) and set %s to the file",
			path, name, firstWords(loaded), mpiVariable)
	}
	mpiStart.loaded = true
	return nil
}

// shimLibrary returns the name of the MPI library of the opened shim. In a host program that is
// linked with MPI, the host's library answers the shim's calls, because the linker takes the first
// function of a name. So the library must not be called before its headers fit: constants such as
// the length of texts differ between the libraries.
func shimLibrary(loaded string) string {
	headers := C.GoString(C.umpi_headers())
	if loaded != "" && headers != "" && shimOf(headers) != shimOf(loaded) {
		return headers
	}
	return libraryName()
}

// shimOf returns the file of mpiLibraries for the library with this version text; "" for none.
func shimOf(text string) string {
	for _, l := range mpiLibraries {
		if containsAny(text, l.names) {
			return l.file
		}
	}
	return ""
}
