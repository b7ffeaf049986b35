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
	"strings"
	"unsafe"

	"ulysses/internal/status"
)

// ErrNoPlugin is the cause in the error of a plug-in that is nowhere: there the CPU is a fair
// choice, while a plug-in that is there and does not work is a fault.
var ErrNoPlugin = errors.New("no CUDA plug-in")

const (
	fileName   = "libulysses_cuda.so"
	variable   = "ULYSSES_CUDA_PLUGIN"
	textLength = 1024
)

// Remedy is how to come by a plug-in.
const Remedy = "build it with make cuda (a wheel for Python that is made afterwards carries it), or name the file in " + variable

// speaks is the version of the interface with the plug-in.
const speaks = uint32(C.ULY_CUDA_ABI)

// plugin is a plug-in that was opened.
type plugin struct {
	path  string
	table *C.uly_cuda_api
}

// load opens the plug-in: the file that ULYSSES_CUDA_PLUGIN names, else libulysses_cuda.so beside
// the program, or the library that this code is in, in lib beside their folders, for
// bin/ulysses-mpi of a source tree where `make cuda` builds it, or where the system's loader looks.
func load() (*plugin, error) {
	if path := os.Getenv(variable); path != "" {
		if _, err := os.Stat(path); err != nil {
			return nil, status.Errorf(status.Device, "%s=%s: no such file: name a %s, or unset it", variable, path, fileName)
		}
		return open(path)
	}
	if path := Find(); path != "" {
		return open(path)
	}
	p, err := open(fileName)
	if err != nil && strings.Contains(err.Error(), fileName+": cannot open shared object file") {
		return nil, status.Errorf(status.Device, "%w: %s is not beside the program or library, in lib beside its folder, in build/cuda of the program's source tree, or where the system's loader looks: %s", ErrNoPlugin, fileName, Remedy)
	}
	return p, err
}

// Find is the file that would be opened, and opens nothing; "" where there is none, but for what
// the system's loader may find.
func Find() string {
	if path := os.Getenv(variable); path != "" {
		return path
	}
	program, err := os.Executable()
	if err != nil {
		program = ""
	}
	text := (*C.char)(C.malloc(textLength))
	defer C.free(unsafe.Pointer(text))
	paths := append(beside(program), inTree(program)...)
	if C.plug_here(text, textLength) != 0 {
		paths = append(beside(C.GoString(text)), paths...)
	}
	for _, path := range paths {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// beside lists where a plug-in that was installed with the program lies.
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

// inTree returns the path at which make cuda leaves the plug-in, for a program in bin of the source
// tree.
func inTree(program string) []string {
	if real, err := filepath.EvalSymlinks(program); err == nil {
		program = real
	}
	root := filepath.Join(filepath.Dir(program), "..")
	if _, err := os.Stat(filepath.Join(root, "cuda", "plugin.mk")); err != nil || filepath.Base(filepath.Dir(program)) != "bin" {
		return nil
	}
	return []string{filepath.Join(root, Built)}
}

// Built is the path of the file that make cuda writes, relative to the source tree.
const Built = "build/cuda/" + fileName

// whole reports what is wrong with a file before the system's loader maps it: one that was cut
// short, by a copy or a full disk, would end the process with a signal.
func whole(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := elf.Open(path) // which reads the table of sections, at the end of the file
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
			return fmt.Errorf("it has %d bytes, and a part of it is to begin at %d with %d", info.Size(), p.Off, p.Filesz)
		}
	}
	if !headers {
		return errors.New("no part of it holds its headers")
	}
	return nil
}

// open opens one file, or what the system's loader finds by a bare name.
func open(path string) (*plugin, error) {
	if filepath.Base(path) != path {
		if err := whole(path); err != nil {
			return nil, status.Errorf(status.Device, "CUDA plug-in %s cannot be opened: it is no library, or not a whole one: %w: copy it again, or build it with make cuda", path, err)
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
	case have != 0 && uint32(have) != speaks:
		return nil, status.Errorf(status.Device, "CUDA plug-in %s speaks version %d of the interface, this program version %d: use the %s that was built with "+
			"this program (make cuda)", path, have, speaks, fileName)
	case have != 0:
		return nil, status.Errorf(status.Device, "CUDA plug-in %s does not fit this program, though both say version %d: it has %s: use the %s that was built "+
			"with this program (make cuda)", path, have, why, fileName)
	case why != "":
		return nil, status.Errorf(status.Device, "CUDA plug-in %s cannot be opened: %s: build it with make cuda, on a system as old as the oldest it is to run on", path, why)
	}
	return nil, status.Errorf(status.Device, "%s is a library but no CUDA plug-in: it has no function uly_cuda_plugin: name a %s in %s, or unset it", path, fileName, variable)
}

// Library is one of the libraries that the plug-in looks for at run time.
type Library struct {
	Name  string
	Found string // version and path, or why not
	// What is lost without it and how to get it; "" when it was found.
	Costs, Remedy string
}

// Findings is what a plug-in sees of this machine.
type Findings struct {
	Plugin    string // path
	Count     int    // of GPUs that this process sees
	Text      string // why there is none
	Libraries []Library
}

// Probe opens the plug-in and asks what there is, without touching a GPU.
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
		return Findings{Plugin: p.path}, status.Errorf(status.Code(code), "CUDA plug-in %s: %s", p.path, C.GoString(&out.text[0]))
	}
	f := Findings{Plugin: p.path, Count: int(out.devices), Text: C.GoString(&out.text[0])}
	for i := range out.library {
		l := &out.library[i]
		if l.name[0] == 0 {
			continue
		}
		found := Library{Name: C.GoString(&l.name[0]), Found: C.GoString(&l.found[0])}
		if l.ok == 0 {
			found.Costs, found.Remedy = C.GoString(&l.costs[0]), C.GoString(&l.remedy[0])
		}
		f.Libraries = append(f.Libraries, found)
	}
	return f, nil
}
