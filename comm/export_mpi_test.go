//go:build mpi

package comm

var (
	StartRanks = startRanks
	Inside     = currentScenario
)
