//go:build mpi

package comm

/*
#cgo pkg-config: ompi
#include "mpi_bridge.h"
*/
import "C"

import (
	"github.com/emer/empi/mpi"

	"ulysses/internal/status"
)

// The program is linked with MPI and its table. The package empi starts and ends MPI and broadcasts
// bytes of the host; what it lacks (v-variants, splits, requests, abort with a code) is the table.

func init() {
	var have C.uint32_t
	C.umpi_use(C.umpi_table(C.UMPI_ABI, &have))
	mpiStart.loaded = true
}

// Available reports whether this program was built with MPI.
func Available() bool { return true }

// loadMPI finds the table; here it is linked.
func loadMPI() error { return nil }

// World is all processes of the MPI job, a duplicate of MPI_COMM_WORLD. The first call starts MPI,
// unless a host program has. It is collective. Compare its size with what the launcher says
// (slurm.Check): a foreign launcher makes every process a world of its own.
func World() (Comm, error) {
	const name = "comm.World"
	mpiStart.Lock()
	defer mpiStart.Unlock()
	initialized, finalized, level := mpiState()
	switch {
	case finalized:
		return nil, status.Errorf(status.Comm, "%s: MPI has ended: it cannot be started twice", name)
	case initialized && level != threadMultiple:
		return nil, status.Errorf(status.Unsupported, "%s: the host program started MPI with thread level %d: start it with MPI_THREAD_MULTIPLE", name, level)
	case !initialized:
		prepare()
		if err := mpi.InitThreadSafe(); err != nil {
			return nil, status.Errorf(status.Unsupported, "%s: this MPI does not grant MPI_THREAD_MULTIPLE: use a library built with it: %w", name, err)
		}
		mpiStart.end = mpi.Finalize
		mpi.LogErrors = false // they are returned
	}
	m := &mpiComm{}
	if err := mpiError(name+": MPI_Comm_dup", C.umpi_world(&m.c)); err != nil {
		return nil, err
	}
	if _, err := m.sized(name); err != nil {
		return nil, err
	}
	var control *mpi.Comm
	m.control = func(root int, data []byte) (err error) {
		if control == nil {
			if control, err = mpi.NewComm(nil); err != nil {
				return err
			}
		}
		return control.BcastU8(root, data)
	}
	return m, nil
}

// Shims are files that are opened for MPI: none here.
func Shims() []string { return []string{} }
