// Package comm provides communicators: collectives that move tensors between ranks.
//
// Comm is the interface. Local connects goroutine ranks of one process. World returns the program's
// own MPI job, and FromMPI duplicates an MPI communicator of a host program. NewHost makes a
// communicator from a host program's own collectives. Package cuda adds communicators for GPU
// memory (NCCL, CUDA IPC, staged). A program opens one of these, then NewMesh splits it into axes
// and wraps each in a *Counted, which times each call, counts its bytes and lets a Watch end the
// job if a rank is late. Agree and Same compare errors and values of all ranks.
//
// Unless a comment says otherwise, an operation is collective over its communicator, and all ranks
// call operations in the same order. Tensors are dense. Rows are slices of the first axis: a row of
// a tensor [n, 4, 8] has 32 elements, and a row of a tensor [n] has one. Counts of rows are slices
// with one entry for each rank. Communicators do not own tensors; a call may use the memory of its
// tensors until it returns, or until Wait returns.
package comm

import (
	"time"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Op is the operation of a reduction.
type Op uint8

const (
	Sum Op = iota
	Max
	Min
)

// Request is an all-to-all in progress. Its tensors must not be read or written before Wait
// returns. Wait is called once; a second call returns an error. Ranks may wait for several requests
// in different orders.
type Request interface{ Wait() error }

// Tester is a Request with Test, which reports without blocking whether Wait would return at once.
// Test also makes progress: most MPI libraries move large messages only inside their calls.
type Tester interface{ Test() (bool, error) }

// Waiter is a communicator that measures how long its calls have waited for other ranks. Waited
// returns the sum over all calls. It grows only while this rank is in a call, and the calls and
// Waited are made by one goroutine.
//
// A call waits until every rank whose data it needs has started the call. The rest of its time is
// spent moving bytes. Bytes of ranks that are there already move while the call waits for a late
// rank. Waiting is therefore the time that a call would save if all ranks came at once, and moving
// the time that faster links would save. The time between the arrival of the last rank and the
// moment when the operating system gives this rank a core counts as moving.
type Waiter interface{ Waited() time.Duration }

// Comm is a group of ranks.
type Comm interface {
	Rank() int
	Size() int
	Kind() string // "local", "mpi", "host", "nccl", "ipc" or "staged"
	// Split makes a communicator of the ranks with this color, ordered by key, then by rank. A rank
	// with a negative color calls Split too and receives nil.
	Split(color, key int) (Comm, error)
	Barrier() error
	// AllToAll sends sendRows[j] rows of src, in rank order, to rank j and receives recvRows[j]
	// rows from it into dst, in rank order. dst and src may have more rows than are moved; they do
	// not overlap. A tensor without rows may be absent (the zero Tensor).
	AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error
	// AllToAllStart starts an AllToAll and does not wait for it.
	AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error)
	// AllReduce combines t over the ranks in place: t0 ∘ t1 ∘ …, in rank order. The result is
	// bitwise equal on every rank and with every communicator for host memory. BF16 is added in F32
	// and rounded once. Max and Min propagate NaN. Types: F32, F64, BF16, I32, I64.
	AllReduce(s device.Stream, t tensor.Tensor, op Op) error
	// AllGather collects rows[j] rows from rank j, in rank order, into dst on every rank. src has
	// this rank's rows. It may be this rank's block of dst.
	AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	// ReduceScatter sums src over the ranks, in rank order, and writes rows[rank] rows to dst,
	// which may be this rank's block of src. Types: F32, F64, BF16, I32, I64.
	ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	// Broadcast copies t of the root to every rank.
	Broadcast(s device.Stream, t tensor.Tensor, root int) error
	// SendRecv sends to one rank and receives from another. A negative rank means no message. Only
	// the two ranks of a message call SendRecv, except with Kind "host", where all ranks must.
	SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error
	// Abort ends the whole job with the code. Calls of other ranks fail, or their processes end. It
	// is not collective and may be called from any goroutine.
	Abort(code status.Code, reason string)
	// Close releases the communicator. It is collective with MPI and with GPU memory.
	Close() error
}
