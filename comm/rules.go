package comm

import "ulysses/tensor"

// Communicators that a device brings keep the same rules as those of the host: these are the checks
// of arguments and the layout of rows, for memory that nobody looks at here.

// Layered is a communicator for memory of a device that stands on one for memory of the host, over
// the same ranks.
type Layered interface{ Host() Comm }

// Reserve makes, before the first step, what a communicator needs beside the tensors for n
// exchanges at a time, in which this rank sends and receives so many bytes in all. Most need
// nothing.
func Reserve(c Comm, n int, bytes int64) error {
	if counted, ok := c.(*Counted); ok {
		c = counted.inner
	}
	if r, ok := c.(interface{ Reserve(int, int64) error }); ok {
		return r.Reserve(n, bytes)
	}
	return nil
}

// Direct is a communicator of the host whose exchanges may lie in memory of a GPU.
type Direct interface {
	TakesDeviceMemory() bool
	// AllToAllDirect is AllToAllStart without the rank's own rows, which are the caller's to copy.
	// What it sends is there when it is called.
	AllToAllDirect(dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error)
}

func anywhere(t tensor.Tensor) tensor.Tensor {
	t.Where = tensor.Host
	return t
}

// CheckAllToAll refuses what AllToAll must.
func CheckAllToAll(dst, src tensor.Tensor, recvRows, sendRows []int64, size int) error {
	return checkAllToAll(anywhere(dst), anywhere(src), recvRows, sendRows, size)
}

// CheckAllGather refuses what AllGather must.
func CheckAllGather(dst, src tensor.Tensor, rows []int64, rank, size int) error {
	return checkShards("comm.AllGather", "dst", "src", anywhere(dst), anywhere(src), rows, rank, size)
}

// CheckReduceScatter refuses what ReduceScatter must.
func CheckReduceScatter(dst, src tensor.Tensor, rows []int64, rank, size int) error {
	const name = "comm.ReduceScatter"
	if err := checkShards(name, "src", "dst", anywhere(src), anywhere(dst), rows, rank, size); err != nil {
		return err
	}
	return checkReduce(name, anywhere(src), Sum)
}

// CheckAllReduce refuses what AllReduce must.
func CheckAllReduce(t tensor.Tensor, op Op) error {
	return checkReduce("comm.AllReduce", anywhere(t), op)
}

// CheckBroadcast refuses what Broadcast must.
func CheckBroadcast(t tensor.Tensor, root, size int) error {
	if err := usable("comm.Broadcast", "tensor", anywhere(t)); err != nil {
		return err
	}
	return checkRoot(root, size)
}

// CheckSendRecv refuses what SendRecv must.
func CheckSendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to, size int) error {
	return checkSendRecv(anywhere(recv), from, anywhere(send), to, size)
}

// RowBytes is the bytes of one slice of the first axis; an absent tensor has none.
func RowBytes(t tensor.Tensor) int64 { return rowBytes(t) }

// RowsBefore is the first row of rank's block.
func RowsBefore(rows []int64, rank int) int64 { return before(rows, rank) }
