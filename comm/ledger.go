package comm

import "sync"

// Names of operations in a Ledger.
const (
	OpAllToAll      = "all-to-all"
	OpAllReduce     = "all-reduce"
	OpAllGather     = "all-gather"
	OpReduceScatter = "reduce-scatter"
	OpBroadcast     = "broadcast"
	OpSendRecv      = "send-receive"
	OpBarrier       = "barrier"
)

// Entry has the cost of one operation on one axis of the mesh for one rank.
type Entry struct {
	Axis, Op string
	// Control marks calls without a stream. They move small values in host memory: counts, sums of
	// losses, flags and errors.
	Control bool
	Calls   int64
	Bytes   int64   // sent to other ranks
	Seconds float64 // in the call; for AllToAllStart, in the start and in Wait
	Waiting float64 // seconds, of Seconds, until the last peer had started the call (see Waiter)
}

// Ledger counts a rank's communication. Several goroutines may use it at once. A nil Ledger counts
// nothing.
type Ledger struct {
	mu      sync.Mutex
	entries []Entry
	index   map[line]int
}

// line is the key of an entry.
type line struct {
	axis, op string
	control  bool
}

// NewLedger returns an empty Ledger.
func NewLedger() *Ledger { return &Ledger{index: map[line]int{}} }

func (l *Ledger) add(at line, calls, bytes int64, seconds, waiting float64) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	i, ok := l.index[at]
	if !ok {
		i = len(l.entries)
		l.entries = append(l.entries, Entry{Axis: at.axis, Op: at.op, Control: at.control})
		l.index[at] = i
	}
	e := &l.entries[i]
	e.Calls += calls
	e.Bytes += bytes
	e.Seconds += seconds
	e.Waiting += waiting
}

// Entries returns a copy of the entries, in the order of the first calls.
func (l *Ledger) Entries() []Entry {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Entry(nil), l.entries...)
}

// Get returns the sum of the entries of an operation on an axis, with and without a stream; zero if
// there are none.
func (l *Ledger) Get(axis, op string) Entry {
	sum := Entry{Axis: axis, Op: op}
	for _, e := range l.Entries() {
		if e.Axis == axis && e.Op == op {
			sum.Calls += e.Calls
			sum.Bytes += e.Bytes
			sum.Seconds += e.Seconds
			sum.Waiting += e.Waiting
		}
	}
	return sum
}

// The functions below return the bytes that a rank sends if each block goes directly from its owner
// to its reader. The sum over the ranks is the minimum; a library may send more by other routes.

// AllToAllBytes returns the bytes that rank sends: Σ_{j≠rank} sendRows[j]·row, with row the bytes
// of a row.
func AllToAllBytes(rank int, sendRows []int64, row int64) int64 {
	return (total(sendRows) - sendRows[rank]) * row
}

// AllGatherBytes returns the bytes of the rank's own rows, once for each other rank:
// (P-1)·rows[rank]·row.
func AllGatherBytes(rank int, rows []int64, row int64) int64 {
	return int64(len(rows)-1) * rows[rank] * row
}

// ReduceScatterBytes returns the bytes of the rows that other ranks sum: Σ_{j≠rank} rows[j]·row.
func ReduceScatterBytes(rank int, rows []int64, row int64) int64 {
	return (total(rows) - rows[rank]) * row
}

// AllReduceBytes returns the bytes of a reduce-scatter and an all-gather of n elements of elem
// bytes, sharded by Shard: about 2(P-1)/P·n·elem.
func AllReduceBytes(rank, size int, n, elem int64) int64 {
	lo, hi := Shard(n, size, rank)
	return (n + int64(size-2)*(hi-lo)) * elem
}

// BroadcastSent returns the bytes that rank sends in a chain from the root in rank order: every
// rank except the last of the chain sends all bytes once.
func BroadcastSent(rank, root, size int, bytes int64) int64 {
	if (rank+1)%size == root {
		return 0
	}
	return bytes
}
