// Package comm provides communicators: collectives that move tensors between ranks.
//
// Comm is the interface. Local connects goroutine ranks of one process. World is the program's own
// MPI, and FromMPI an MPI communicator of a host program. NewHost makes a communicator from a host
// program's own collectives. A device may bring another one (NCCL, CUDA IPC). Callers use a
// *Counted, which times each call, counts its bytes and ends the job if a rank is late. Agree and
// Same compare errors and values of all ranks. NewMesh splits a communicator into axes.
//
// Unless a comment says otherwise, an operation is collective over its communicator, and all ranks
// call operations in the same order. Tensors are dense. Rows are slices of the first axis: a row of
// a tensor [n, 4, 8] has 32 elements, and a row of a tensor [n] has one.
package comm

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Op is a reduction.
type Op uint8

const (
	Sum Op = iota
	Max
	Min
)

// Request is an operation under way; its tensors must stay untouched until Wait, which is called
// once.
type Request interface{ Wait() error }

// Tester is a Request that can be asked whether Wait would return at once. Asking also lets the
// exchange proceed: most MPI libraries move large messages only inside their calls.
type Tester interface{ Test() (bool, error) }

// Comm is a group of ranks.
type Comm interface {
	Rank() int
	Size() int
	Kind() string // "local", "mpi", "host", "nccl", "ipc"
	// Split makes a communicator of the ranks with this color, ordered by key, then by rank. A
	// negative color takes part and gets nil.
	Split(color, key int) (Comm, error)
	Barrier() error
	// AllToAll sends sendRows[j] rows of src, in rank order, to rank j and receives recvRows[j]
	// rows from it into dst, in rank order. dst and src may have more rows than are moved; they do
	// not overlap. A tensor without rows may be absent.
	AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error
	// AllToAllStart is the same, not waited for.
	AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error)
	// AllReduce combines t over the ranks in place: t0 ∘ t1 ∘ …, in rank order, so the bits are the
	// same on every rank and with every host communicator. BF16 is added up in f32 and rounded
	// once; Max and Min keep a NaN. F32, F64, BF16, I32, I64.
	AllReduce(s device.Stream, t tensor.Tensor, op Op) error
	// AllGather collects rows[j] rows from rank j, in rank order, into dst on every rank; src has
	// this rank's rows and may be their own place in dst.
	AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	// ReduceScatter sums src over the ranks, in rank order, and leaves rows[rank] rows in dst,
	// which may be their own place in src. F32, F64, BF16, I32, I64.
	ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	// Broadcast copies t of the root to every rank.
	Broadcast(s device.Stream, t tensor.Tensor, root int) error
	// SendRecv sends to one rank and receives from another; a negative rank is nobody. It is not
	// collective, but with Kind "host" it is.
	SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error
	// Abort ends the whole job with the code as soon as it can; peers' calls fail or their
	// processes end. It may be called from any goroutine.
	Abort(code status.Code, reason string)
	Close() error
}
