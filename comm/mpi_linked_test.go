//go:build mpi

package comm

import "testing"

// needTable and checkLoadedMPI do nothing: with the tag mpi, the table is linked.
func needTable(t *testing.T) {}

func checkLoadedMPI(t *testing.T) {}
