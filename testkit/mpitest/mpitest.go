// Package mpitest runs the same tests on goroutine ranks and, built with the tag mpi, on processes
// under mpirun.
//
// A package's TestMain calls Main, and its tests call Ranks for each of Sizes. Without the tag that
// is 1 to 8 goroutines. With it the test binary starts itself anew under mpirun, once for each
// number of ranks, and every process runs all tests.
package mpitest

import (
	"testing"

	"ulysses/comm"
)

// Ranks runs f on n ranks and fails the test with the first error of any.
func Ranks(t testing.TB, n int, f func(c comm.Comm) error) {
	t.Helper()
	if err := run(n, f); err != nil {
		t.Fatalf("%d ranks: %v", n, err)
	}
}
