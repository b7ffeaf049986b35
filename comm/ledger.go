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

// Entry is what one operation on one axis of the mesh has cost one rank.
type Entry struct {
	Axis, Op string
	// calls without a stream: counts, sums of losses, flags and errors, which ranks settle on the
	// host
	Control bool
	Calls   int64
	Bytes   int64   // sent to other ranks
	Seconds float64 // in the call; for a started exchange, in its start and in its wait
}

// Ledger counts a rank's communication. It is safe for several goroutines; a nil Ledger counts
// nothing.
type Ledger struct {
	mu      sync.Mutex
	entries []Entry
	index   map[line]int
}

// line is what entries differ in.
type line struct {
	axis, op string
	control  bool
}

// NewLedger starts an empty account.
func NewLedger() *Ledger { return &Ledger{index: map[line]int{}} }

func (l *Ledger) add(at line, calls, bytes int64, seconds float64) {
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
}

// Entries is a copy of the account, in order of first use.
func (l *Ledger) Entries() []Entry {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Entry(nil), l.entries...)
}

// Get is what an operation on an axis has cost, with a stream and without; zero when there was
// none.
func (l *Ledger) Get(axis, op string) Entry {
	sum := Entry{Axis: axis, Op: op}
	for _, e := range l.Entries() {
		if e.Axis == axis && e.Op == op {
			sum.Calls += e.Calls
			sum.Bytes += e.Bytes
			sum.Seconds += e.Seconds
		}
	}
	return sum
}

// The bytes below are those that a rank must send when data moves straight from owner to reader,
// which is also the least possible in sum over the ranks; a library may route them otherwise. Parts
// are cut as Shard does.

// AllToAllBytes is what rank sends: Σ_{j≠rank} sendRows[j]·row.
func AllToAllBytes(rank int, sendRows []int64, row int64) int64 {
	return (total(sendRows) - sendRows[rank]) * row
}

// AllGatherBytes is the rank's own rows, once for each other rank: (P-1)·rows[rank]·row.
func AllGatherBytes(rank int, rows []int64, row int64) int64 {
	return int64(len(rows)-1) * rows[rank] * row
}

// ReduceScatterBytes is the rows that other ranks sum: Σ_{j≠rank} rows[j]·row.
func ReduceScatterBytes(rank int, rows []int64, row int64) int64 {
	return (total(rows) - rows[rank]) * row
}

// AllReduceBytes is a reduce-scatter and an all-gather of n elements of elem bytes cut by Shard:
// about 2(P-1)/P·n·elem.
func AllReduceBytes(rank, size int, n, elem int64) int64 {
	lo, hi := Shard(n, size, rank)
	return (n + int64(size-2)*(hi-lo)) * elem
}

// BroadcastSent is a chain from the root on, in rank order: every rank but the last of the chain
// sends all bytes once.
func BroadcastSent(rank, root, size int, bytes int64) int64 {
	if (rank+1)%size == root {
		return 0
	}
	return bytes
}
