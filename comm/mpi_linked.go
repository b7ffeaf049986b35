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

// With the tag mpi, the program is linked with MPI and the table. The package empi starts and ends
// MPI and broadcasts bytes. The table has everything else, which empi does not offer: collectives
// with uneven counts, splits, requests, and abort with a code.

func init() {
	var have C.uint32_t
	C.umpi_use(C.umpi_table(C.UMPI_ABI, &have))
	mpiStart.loaded = true
}

// Available reports whether this program was built with MPI.
func Available() bool { return true }

// loadMPI does nothing: the table is linked.
func loadMPI() error { return nil }

// World returns a duplicate of MPI_COMM_WORLD, which has all processes of the MPI job. The first
// call starts MPI, unless a host program has started it. Collective over MPI_COMM_WORLD. Compare
// the size with the launcher's (slurm.Check): under the launcher of another MPI library, every
// process is a world of one rank.
func World() (Comm, error) {
	const name = "comm.World"
	mpiStart.Lock()
	defer mpiStart.Unlock()
	initialized, finalized, level := mpiState()
	switch {
	case finalized:
		return nil, status.Errorf(status.Comm, "%s: MPI has ended and cannot be started again; start a new process",
			name)
	case initialized && level != threadMultiple:
		return nil, status.Errorf(status.Unsupported,
			"%s: the host program started MPI with thread level %d; start it with MPI_THREAD_MULTIPLE", name, level)
	case !initialized:
		setLibraryDefaults()
		if err := mpi.InitThreadSafe(); err != nil {
			return nil, status.Errorf(status.Unsupported,
				"%s: this MPI library does not grant MPI_THREAD_MULTIPLE: %w; use a library that was built with it",
				name, err)
		}
		mpiStart.end = mpi.Finalize
		mpi.LogErrors = false // errors are returned
	}
	m := &mpiComm{}
	if err := mpiError(name+": MPI_Comm_dup", C.umpi_world(&m.c)); err != nil {
		return nil, err
	}
	if _, err := m.initialize(name); err != nil {
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

// Shims returns no files: the table is linked.
func Shims() []string { return []string{} }
