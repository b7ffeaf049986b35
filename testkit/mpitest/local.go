//go:build !mpi

package mpitest

import (
	"testing"

	"ulysses/comm"
)

// Main runs the tests of a package; its result is the exit code.
func Main(m *testing.M) int { return m.Run() }

// Sizes are the numbers of ranks to test on.
func Sizes() []int { return []int{1, 2, 3, 4, 8} }

func run(n int, f func(c comm.Comm) error) error { return comm.RunLocal(n, f) }
