package dryrun

import (
	"math/bits"
	"runtime"
)

// waitShare is the share of the work between two communications that ranks on CPUs wait for the
// slowest rank, although all have the same work. On two ranks with one core each, 6 to 13 percent
// were measured (benchmarks/results/plan.md).
const waitShare = 0.08

// WaitCost returns the seconds that ranks on CPUs wait in one communication. work is the seconds of
// computation since the previous communication, share the number of ranks that share a core.
// Waiting processes poll for messages, and the scheduler gives each of them a slice of the core, so
// the slowest rank loses one slice to each other rank on its core.
func WaitCost(work, share float64) float64 { return waitShare*work + max(0, share-1)*slice() }

// slice returns the least time that Linux lets a thread run on a contended core: the base slice of
// its scheduler.
func slice() float64 { return 0.7e-3 * float64(bits.Len(uint(min(8, runtime.NumCPU())))) }
