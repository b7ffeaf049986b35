//go:build !mpi

package comm

import "ulysses/internal/status"

// Available reports whether this program was built with MPI.
func Available() bool { return false }

// Library is the MPI library and its thread level.
func Library() string { return "none: built without the tag mpi" }

// World is all processes of an MPI job; here it is refused.
func World() (Comm, error) {
	return nil, status.Errorf(status.Unsupported, "comm.World: this program was built without MPI: build it with -tags mpi, or run ranks in one process with --ranks")
}

// Finalize ends MPI; here there is none.
func Finalize() {}
