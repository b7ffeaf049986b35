package comm

/*
#include "mpi_bridge.h"

static void set_hooks(void *before, void *after) {
	*(void **)&umpi_before = before;
	*(void **)&umpi_after = after;
}
*/
import "C"

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// SetMPIHooks sets two C functions: void before(void *) and void after(const void *). Every MPI
// call calls before, then MPI, then after, on its thread, with a pointer to the same 128 bytes.
// Call it once, while the library is initialized.
func SetMPIHooks(before, after unsafe.Pointer) { C.set_hooks(before, after) }

// FromMPI returns a duplicate of a host program's communicator, whose handle is an integer, as
// MPI_Comm_c2f and mpi4py's py2f return it. -1 means MPI_COMM_WORLD. With -1, FromMPI starts MPI if
// it was not started; then Finalize, or the exit of the process with code 0, ends it. A host
// program that started MPI ends it itself, after Close. Collective over the given communicator.
// With -1, a world of one rank is an error if the launcher has started several tasks.
//
// Every thread level is supported. Below MPI_THREAD_MULTIPLE, only one thread of the process,
// including the host's own code, may be inside MPI at a time. Below MPI_THREAD_SERIALIZED, calls
// from a thread other than the one that started MPI return an error. This package calls MPI only on
// the threads of its callers, except for Abort, which a Watch calls to end the job.
//
// Errors of MPI are returned. The error handler of the host's communicator is not changed.
func FromMPI(fortran int64) (Comm, error) {
	const name = "comm.FromMPI"
	if fortran < math.MinInt32 || fortran > math.MaxInt32 {
		return nil, status.Errorf(status.InvalidArgument,
			"%s: handle %d does not fit 32 bits; pass the int that MPI_Comm_c2f returns", name, fortran)
	}
	if err := ensureMPI(name, fortran); err != nil {
		return nil, err
	}
	m := &mpiComm{}
	var code C.int
	if fortran == -1 {
		code = C.umpi_world(&m.c)
	} else {
		code = C.umpi_from(C.int32_t(fortran), &m.c)
	}
	operation := name
	if code != C.UMPI_THREAD { // an error of the thread is not of the handle
		operation = fmt.Sprintf("%s: handle %d", name, fortran)
	}
	if err := mpiError(operation, code); err != nil {
		return nil, err
	}
	if _, err := m.initialize(name); err != nil {
		return nil, err
	}
	if fortran == -1 {
		if err := checkAlone(name, libraryName(), slurm.Env(), m.size); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}

// checkAlone returns an error if MPI_COMM_WORLD has one rank, although a launcher has started
// several tasks. Otherwise, with the launcher of another MPI library, each process would be rank 0
// of 1 and compute everything alone.
func checkAlone(name, library string, env slurm.Environment, size int) error {
	if size > 1 || env.Tasks <= 1 {
		return nil
	}
	fix := "start the ranks with the mpirun of that MPI library, or build the file for the launcher's (make mpi-shim MPICC=its mpicc)"
	if env.Launcher == "srun" {
		fix = slurm.UsePMI
	}
	return status.Errorf(status.InvalidArgument,
		"%s: %s started %d tasks (%s), but %s found 1 rank; %s; if the tasks shall not communicate, use a context of one rank without MPI",
		name, env.Launcher, env.Tasks, env.SizeVariable(), library, fix)
}

// ensureMPI loads the table, and starts MPI if the handle is -1 and MPI was not started. It does
// not hold the lock during collective calls, because threads of a host program may make
// communicators at once, in a different order on each rank.
func ensureMPI(name string, fortran int64) error {
	mpiStart.Lock()
	defer mpiStart.Unlock()
	if err := loadMPI(); err != nil {
		return err
	}
	initialized, finalized, _ := mpiState()
	switch {
	case finalized:
		return status.Errorf(status.Comm, "%s: MPI has ended and cannot be started again; start a new process", name)
	case !initialized && fortran != -1:
		return status.Errorf(status.InvalidArgument,
			"%s: handle %d: MPI has not been started; call MPI_Init first, or pass -1 to start MPI with MPI_COMM_WORLD",
			name, fortran)
	case !initialized:
		return startMPI(threadMultiple)
	}
	return nil
}

// startMPI starts MPI with at most the given thread level; the library may grant a lower one.
func startMPI(level int) error {
	setLibraryDefaults()
	return mpiError("comm.FromMPI: MPI_Init_thread", C.umpi_start(C.int(level)))
}
