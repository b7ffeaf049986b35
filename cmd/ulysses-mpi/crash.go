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

// catchCrashes makes a crash exit with status.Internal. The Go runtime exits with 2 after a panic that nothing recovers, a fatal error or a fault
// in C code, and 2 says that the job file is wrong. Told to abort instead, it prints the stacks and raises SIGABRT, and the handler of crash.c
// exits; there is no core dump.
func catchCrashes() {
	debug.SetTraceback("crash")
	host, _ := os.Hostname()
	text := C.CString(fmt.Sprintf("ulysses-mpi: rank %d on %.100s: the program crashed: please report the lines above\n", slurm.Env().Rank, host))
	defer C.free(unsafe.Pointer(text))
	C.crash_code(C.int(status.Internal), text)
}
