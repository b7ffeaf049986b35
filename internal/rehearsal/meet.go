package rehearsal

import (
	"math/bits"
	"runtime"
)

// late is the share of the work between two meetings that ranks of a CPU wait for the last of them, whose work is the same: 6 to 13 percent were measured on
// two ranks with a core each (benchmarks/results/plan.md).
const late = 0.08

// MeetingCost is the seconds that it costs ranks of a CPU to meet which compute so long between two meetings, and so many of which share a core. A rank that is waited for waits a slice for each of those that share its core: processes that wait for a message look for it again and again, and the
// scheduler gives them their share of the core.
func MeetingCost(work, share float64) float64 { return late*work + max(0, share-1)*slice() }

// slice is the least time that Linux lets a thread run on a core that others want: the base slice of its scheduler.
func slice() float64 { return 0.7e-3 * float64(bits.Len(uint(min(8, runtime.NumCPU())))) }
