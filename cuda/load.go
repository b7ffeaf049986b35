// Package cuda implements device.Device on an NVIDIA GPU through the plug-in libulysses_cuda.so,
// and communicators for GPU memory. The plug-in is opened at run time: the program builds and runs
// without the plug-in and without CUDA. kernels.h is the interface between the two.
package cuda

/*
#cgo linux LDFLAGS: -ldl
#include <stdlib.h>
#include "bridge.h"
*/
import "C"

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"ulysses/internal/ownfile"
	"ulysses/internal/status"
)

// ErrNoPlugin is wrapped by the errors of a missing plug-in. A caller may then use the CPU. A
// plug-in that exists but cannot be opened gives another error.
var ErrNoPlugin = errors.New("no CUDA plug-in")

const (
	fileName   = "libulysses_cuda.so"
	variable   = "ULYSSES_CUDA_PLUGIN"
	textLength = 1024
)

// InstallHint tells the user how to get a plug-in.
const InstallHint = "build it with make cuda (a Python wheel that is built afterwards contains it), or name its file in " +
	variable

// interfaceVersion is the version of the interface with the plug-in.
const interfaceVersion = uint32(C.ULY_CUDA_ABI)

// plugin is an open plug-in.
type plugin struct {
	path  string
	table *C.uly_cuda_api
}

// load opens the plug-in. It tries the file that ULYSSES_CUDA_PLUGIN names. Without the variable,
// it tries libulysses_cuda.so beside the program or the library with this code, in lib beside that
// folder, in build/cuda of the source tree of a program in bin (where make cuda writes it), and in
// the paths of the system's loader.
func load() (*plugin, error) {
	if path := os.Getenv(variable); path != "" {
		if _, err := os.Stat(path); err != nil {
			return nil, status.Errorf(status.Device, "%s=%s: no such file; set it to the path of a %s, or unset it",
				variable, path, fileName)
		}
		if filepath.Base(path) == path { // in this folder; the system's loader would not search it
			path = "./" + path
		}
		return open(path)
	}
	if path := Find(); path != "" {
		return open(path)
	}
	p, err := open(fileName)
	if err != nil && strings.Contains(err.Error(), fileName+": cannot open shared object file") {
		return nil, status.Errorf(status.Device,
			"%w: %s was not found beside the program or library, in lib beside its folder, in build/cuda of the program's source tree, or by the system's loader; %s",
			ErrNoPlugin, fileName, InstallHint)
	}
	return p, err
}

// Find returns the path of the plug-in that load would open, without opening it; "" if there is
// none. It does not search the paths of the system's loader.
func Find() string {
	if path := os.Getenv(variable); path != "" {
		return path
	}
	program, err := os.Executable()
	if err != nil {
		program = ""
	}
	for _, path := range slices.Concat(beside(ownfile.Path()), beside(program), inTree(program)) {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// beside returns the paths of a plug-in that was installed with the program.
func beside(program string) []string {
	if program == "" {
		return nil
	}
	if real, err := filepath.EvalSymlinks(program); err == nil {
		program = real
	}
	folder := filepath.Dir(program)
	return []string{filepath.Join(folder, fileName), filepath.Join(folder, "..", "lib", fileName)}
}

// inTree returns the path that make cuda writes to, if the program is in bin of the source tree.
func inTree(program string) []string {
	if real, err := filepath.EvalSymlinks(program); err == nil {
		program = real
	}
	root := filepath.Join(filepath.Dir(program), "..")
	if _, err := os.Stat(filepath.Join(root, "cuda", "plugin.mk")); err != nil ||
		filepath.Base(filepath.Dir(program)) != "bin" {
		return nil
	}
	return []string{filepath.Join(root, Built)}
}

// Built is the path of the file that make cuda writes, relative to the source tree.
const Built = "build/cuda/" + fileName

// checkFile returns an error if the system's loader must not map the file. A file that a copy or a
// full disk has truncated would end the process with a signal.
func checkFile(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := elf.Open(path) // reads the section table at the end of the file
	if err != nil {
		return err
	}
	defer f.Close()
	headers := false
	for _, p := range f.Progs {
		if p.Type != elf.PT_LOAD {
			continue
		}
		if headers = headers || p.Off == 0; p.Off > uint64(info.Size()) || p.Filesz > uint64(info.Size())-p.Off {
			return fmt.Errorf("it has %d bytes, but a segment begins at byte %d and has %d bytes", info.Size(), p.Off,
				p.Filesz)
		}
	}
	if !headers {
		return errors.New("no segment contains its headers")
	}
	return nil
}

// open opens a file, or a library that the system's loader finds by its bare name.
func open(path string) (*plugin, error) {
	if filepath.Base(path) != path {
		if err := checkFile(path); err != nil {
			return nil, status.Errorf(status.Device,
				"CUDA plug-in %s cannot be opened: it is truncated or not a library: %w; copy it again, or build it with make cuda",
				path, err)
		}
	}
	name, text := C.CString(path), (*C.char)(C.malloc(textLength))
	defer C.free(unsafe.Pointer(name))
	defer C.free(unsafe.Pointer(text))
	var have C.uint32_t
	table := C.plug_load(name, text, textLength, &have)
	why := C.GoString(text)
	switch {
	case table != nil:
		return &plugin{path, table}, nil
	case have != 0 && uint32(have) != interfaceVersion:
		return nil, status.Errorf(status.Device,
			"CUDA plug-in %s has version %d of the interface, this program needs version %d; use the %s that was built with "+
				"this program (make cuda)", path, have, interfaceVersion, fileName)
	case have != 0:
		return nil, status.Errorf(status.Device,
			"CUDA plug-in %s does not match this program, although both have version %d of the interface: %s; use the %s that was built "+
				"with this program (make cuda)", path, have, why, fileName)
	case why != "":
		return nil, status.Errorf(status.Device,
			"CUDA plug-in %s cannot be opened: %s; build it with make cuda on the oldest system that it must run on",
			path, why)
	}
	return nil, status.Errorf(status.Device,
		"%s is a library but not a CUDA plug-in (no function uly_cuda_plugin); name a %s in %s, or unset it", path,
		fileName, variable)
}

// Library is one of the libraries that the plug-in opens at run time.
type Library struct {
	Name  string
	Found string // version and path, or why it was not found
	// What is slower or unavailable without it, and how to install it; "" if it was found.
	Effect, Fix string
}

// Findings is what the plug-in reports about this machine.
type Findings struct {
	Plugin    string // path
	Count     int    // GPUs that this process sees
	Text      string // why Count is 0
	Libraries []Library
}

// Probe opens the plug-in and returns its findings. It does not initialize a GPU.
func Probe() (Findings, error) {
	p, err := load()
	if err != nil {
		return Findings{}, err
	}
	return p.probe()
}

func (p *plugin) probe() (Findings, error) {
	out := (*C.uly_probe)(C.calloc(1, C.sizeof_uly_probe))
	defer C.free(unsafe.Pointer(out))
	if code := C.plug_probe(p.table, out); code != 0 {
		return Findings{Plugin: p.path},
			status.Errorf(status.Code(code), "CUDA plug-in %s: %s", p.path, C.GoString(&out.text[0]))
	}
	f := Findings{Plugin: p.path, Count: int(out.devices), Text: C.GoString(&out.text[0])}
	for i := range out.library {
		l := &out.library[i]
		if l.name[0] == 0 {
			continue
		}
		found := Library{Name: C.GoString(&l.name[0]), Found: C.GoString(&l.found[0])}
		if l.ok == 0 {
			found.Effect, found.Fix = C.GoString(&l.effect[0]), C.GoString(&l.fix[0])
		}
		f.Libraries = append(f.Libraries, found)
	}
	return f, nil
}
