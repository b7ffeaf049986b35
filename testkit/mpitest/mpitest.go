// Package mpitest runs the same tests on goroutine ranks and, built with the tag mpi, on processes
// under mpirun.
//
// A package's TestMain calls Main, and its tests call Ranks for each number of Sizes. Without the
// tag these are 1 to 8 goroutines. With the tag, the test binary starts itself under mpirun, once
// for each number of ranks, and every process runs all tests that call Sizes. The others would only
// repeat what a build without the tag has tested.
package mpitest

import (
	"testing"

	"ulysses/comm"
)

// Ranks runs f on n ranks and fails the test if a rank returns an error.
func Ranks(t testing.TB, n int, f func(c comm.Comm) error) {
	t.Helper()
	if err := run(n, f); err != nil {
		t.Fatalf("%d ranks: %v", n, err)
	}
}
