package comm

/*
#include "mpi_bridge.h"

static void around(void *before, void *after) {
	*(void **)&umpi_before = before;
	*(void **)&umpi_after = after;
}
*/
import "C"

import (
	"math"
	"unsafe"

	"ulysses/internal/status"
)

// AroundMPI sets C functions that are called on the thread of every call of MPI, before it and
// after it, with the same 128 bytes of memory: void before(void *), void after(const void *). It is
// for the initialisation of a library.
func AroundMPI(before, after unsafe.Pointer) { C.around(before, after) }

// FromMPI is a duplicate of the communicator of a host program, whose handle is given as an
// integer: what MPI_Comm_c2f and mpi4py's py2f return. It is collective over that communicator. -1
// is MPI_COMM_WORLD; MPI is started then if nobody has, and ended by Finalize or when the process
// exits with 0. A host that started MPI itself ends it itself, after Close.
//
// Any thread level will do. Below MPI_THREAD_MULTIPLE no two calls of the process, the host's own
// among them, may be in MPI at once, and below MPI_THREAD_SERIALIZED calls from another thread than
// the one that started MPI are refused: nothing here calls MPI on a thread of its own, but for
// Abort, which a Watch calls when there is nothing left to save.
//
// Errors are returned, and errors of the host's communicator stay what they are.
func FromMPI(fortran int64) (Comm, error) {
	const name = "comm.FromMPI"
	if fortran < math.MinInt32 || fortran > math.MaxInt32 {
		return nil, status.Errorf(status.InvalidArgument, "%s: handle %d is beyond 32 bits: pass what MPI_Comm_c2f returns, a C int", name, fortran)
	}
	if err := needMPI(name, fortran); err != nil {
		return nil, err
	}
	m := &mpiComm{}
	var code C.int
	if fortran == -1 {
		code = C.umpi_world(&m.c)
	} else {
		code = C.umpi_from(C.int32_t(fortran), &m.c)
	}
	if err := mpiError(name, code); err != nil {
		return nil, err
	}
	if _, err := m.sized(name); err != nil {
		return nil, err
	}
	return m, nil
}

// needMPI finds MPI, and starts it where that is left to us. The lock is not held in collective
// calls: threads of a host may make communicators at once, in another order on each rank.
func needMPI(name string, fortran int64) error {
	mpiStart.Lock()
	defer mpiStart.Unlock()
	if err := loadMPI(); err != nil {
		return err
	}
	initialized, finalized, _ := mpiState()
	switch {
	case finalized:
		return status.Errorf(status.Comm, "%s: MPI has ended: it cannot be started twice", name)
	case !initialized && fortran != -1:
		return status.Errorf(status.InvalidArgument, "%s: MPI has not been started, so %d is nobody's handle: call MPI_Init first, or pass -1 for MPI_COMM_WORLD, "+
			"which starts it", name, fortran)
	case !initialized:
		return startMPI(threadMultiple)
	}
	return nil
}

// startMPI asks for a thread level and takes what it gets.
func startMPI(level int) error {
	prepare()
	return mpiError("comm.FromMPI: MPI_Init_thread", C.umpi_start(C.int(level)))
}
