package comm

import "ulysses/tensor"

// This file has what communicators for device memory (package cuda) use of this package: the checks
// of arguments and the arithmetic of rows. The functions here do not read the memory of tensors.

// Layered is a communicator for device memory. Host returns the communicator for host memory, over
// the same ranks, on which it is built.
type Layered interface{ Host() Comm }

// Forbidden returns an error if c is of an MPI that forbids calls on this thread. The host program
// has then started MPI for another thread alone. It is not collective.
func Forbidden(c Comm, operation string) error {
	if l, ok := c.(Layered); ok {
		c = l.Host()
	}
	if m, ok := c.(interface{ forbidden(operation string) error }); ok {
		return m.forbidden(operation)
	}
	return nil
}

type prioritySplitter interface {
	SplitPriority(color, key int) (Comm, error)
}

// SplitPriority is c.Split for an axis whose calls must not wait until calls of other axes are
// complete. Communicators for GPU memory give it a stream of its own with priority, where that is
// safe. Others have no streams and ignore the priority. Collective.
func SplitPriority(c Comm, color, key int) (Comm, error) {
	if p, ok := c.(prioritySplitter); ok {
		return p.SplitPriority(color, key)
	}
	return c.Split(color, key)
}

// Reserve allocates, before the first step, the buffers that c needs for n all-to-alls at a time.
// bytes is the sum of the bytes that this rank sends and receives in one of them. Most
// communicators need no buffers. It is not collective.
func Reserve(c Comm, n int, bytes int64) error {
	if counted, ok := c.(*Counted); ok {
		c = counted.inner
	}
	if r, ok := c.(interface{ Reserve(int, int64) error }); ok {
		return r.Reserve(n, bytes)
	}
	return nil
}

// Direct is a communicator for host memory whose all-to-all may also accept tensors in GPU memory
// (CUDA-aware MPI).
type Direct interface {
	// TakesDeviceMemory reports whether AllToAllDirect accepts GPU memory.
	TakesDeviceMemory() bool
	// AllToAllDirect is AllToAllStart without the block that a rank sends to itself, which the
	// caller copies. src must be complete when it is called. Collective.
	AllToAllDirect(dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error)
}

// asHost returns t marked as host memory, for checks that do not depend on where t is.
func asHost(t tensor.Tensor) tensor.Tensor {
	t.Where = tensor.Host
	return t
}

// CheckAllToAll returns the error that AllToAll returns for these arguments of one rank. Like the
// other checks, it is not collective and accepts tensors in any memory.
func CheckAllToAll(dst, src tensor.Tensor, recvRows, sendRows []int64, size int) error {
	return checkAllToAll(asHost(dst), asHost(src), recvRows, sendRows, size)
}

// CheckAllGather returns the error that AllGather returns for these arguments.
func CheckAllGather(dst, src tensor.Tensor, rows []int64, rank, size int) error {
	return checkShards("comm.AllGather", "dst", "src", asHost(dst), asHost(src), rows, rank, size)
}

// CheckReduceScatter returns the error that ReduceScatter returns for these arguments.
func CheckReduceScatter(dst, src tensor.Tensor, rows []int64, rank, size int) error {
	const name = "comm.ReduceScatter"
	if err := checkShards(name, "src", "dst", asHost(src), asHost(dst), rows, rank, size); err != nil {
		return err
	}
	return checkReduce(name, asHost(src), Sum)
}

// CheckAllReduce returns the error that AllReduce returns for these arguments.
func CheckAllReduce(t tensor.Tensor, op Op) error {
	return checkReduce("comm.AllReduce", asHost(t), op)
}

// CheckBroadcast returns the error that Broadcast returns for these arguments.
func CheckBroadcast(t tensor.Tensor, root, size int) error {
	if err := checkMemory("comm.Broadcast", "tensor", asHost(t)); err != nil {
		return err
	}
	return checkRoot(root, size)
}

// CheckSendRecv returns the error that SendRecv returns for these arguments.
func CheckSendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to, size int) error {
	return checkSendRecv(asHost(recv), from, asHost(send), to, size)
}

// RowBytes returns the bytes of one row; 0 for an absent tensor.
func RowBytes(t tensor.Tensor) int64 { return rowBytes(t) }

// RowsBefore returns the index of the first row of rank's block.
func RowsBefore(rows []int64, rank int) int64 { return before(rows, rank) }
