package main

/*
#include <stdlib.h>
#include "crash.h"
*/
import "C"

import (
	"fmt"
	"os"
	"runtime/debug"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// catchCrashes makes a crash exit with status.Internal. Without it the Go runtime exits with 2
// after a panic without recovery, a fatal error or a fault in C code, and 2 means that the job file
// is wrong. catchCrashes sets the runtime to abort: the runtime prints the stacks and raises
// SIGABRT, and the handler of crash.c exits without a core dump.
func catchCrashes() {
	debug.SetTraceback("crash")
	host, _ := os.Hostname()
	text := C.CString(fmt.Sprintf("ulysses-mpi: rank %d on %.100s: ", slurm.Env().Rank, host))
	defer C.free(unsafe.Pointer(text))
	C.crash_code(C.int(status.Internal), text)
}
