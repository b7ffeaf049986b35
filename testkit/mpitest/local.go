//go:build !mpi

package mpitest

import (
	"testing"

	"ulysses/comm"
)

// Main runs the tests of a package and returns the exit code.
func Main(m *testing.M) int { return m.Run() }

// Sizes returns the numbers of ranks on which tests run.
func Sizes() []int { return []int{1, 2, 3, 4, 8} }

func run(n int, f func(c comm.Comm) error) error { return comm.RunLocal(n, f) }
