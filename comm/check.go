package comm

import (
	"math"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// waitFor blocks until the work on the stream is complete; host memory is then ready to be sent. A
// nil stream has no work.
func waitFor(s device.Stream) error {
	if s == nil {
		return nil
	}
	return s.Sync()
}

// ErrWaited returns the error of a second Wait on a request.
func ErrWaited() error {
	return status.Errorf(status.InvalidArgument, "comm.AllToAll: Wait was called twice on one request; call it once")
}

// errClosed returns the error of an operation on a closed communicator.
func errClosed(operation string) error {
	return status.Errorf(status.InvalidArgument, "%s: the communicator is closed", operation)
}

// CheckOwnBlock returns an error if the bytes that a rank sends to itself are not the bytes that it
// expects from itself.
func CheckOwnBlock(operation string, rank int, sent, expected int64) error {
	if sent != expected {
		return status.Errorf(status.InvalidArgument,
			"%s: rank %d sends %d bytes to itself but expects %d; give equal counts", operation, rank, sent, expected)
	}
	return nil
}

// checkMemory returns an error if a communicator for host memory cannot read or write t.
func checkMemory(op, name string, t tensor.Tensor) error {
	switch {
	case t.IsNil():
		return nil
	case t.Where != tensor.Host:
		return status.Errorf(status.Unsupported,
			"%s: %s %v is in device memory; this communicator moves host memory only", op, name, t)
	case !t.Contiguous():
		return status.Errorf(status.InvalidArgument, "%s: %s %v is not dense; pass a dense copy", op, name, t)
	case t.Data == nil && t.Bytes() > 0:
		return status.Errorf(status.InvalidArgument, "%s: %s %v has no memory; allocate it first", op, name, t)
	}
	return nil
}

// checkRows returns an error if the counts do not fit the number of ranks or the tensor. A tensor
// may have more rows than are moved.
func checkRows(op, name string, t tensor.Tensor, rows []int64, size int) error {
	if err := checkMemory(op, name, t); err != nil {
		return err
	}
	if len(rows) != size {
		return status.Errorf(status.InvalidArgument,
			"%s: %d row counts for %s on %d ranks; give one count for each rank", op, len(rows), name, size)
	}
	sum := int64(0)
	for j, r := range rows {
		if r < 0 {
			return status.Errorf(status.InvalidArgument, "%s: %d rows of %s for rank %d; a count is 0 or more", op,
				r, name, j)
		}
		sum = min(sum, math.MaxInt64-r) + r // does not overflow
	}
	return checkRowCount(op, name, t, sum)
}

func checkRowCount(op, name string, t tensor.Tensor, rows int64) error {
	var have int64
	if !t.IsNil() {
		if t.NDim == 0 {
			return status.Errorf(status.InvalidArgument, "%s: %s is a scalar and has no rows; give it one axis",
				op, name)
		}
		have = t.Shape[0]
	}
	if rows > have {
		return status.Errorf(status.InvalidArgument, "%s: the counts give %d rows, %s has %d (%v)", op, rows,
			name, have, t)
	}
	return nil
}

// sameRows returns an error if the rows of the tensors differ in type or bytes.
func sameRows(op string, dst, src tensor.Tensor) error {
	if dst.IsNil() || src.IsNil() {
		return nil
	}
	if dst.DType != src.DType || rowBytes(dst) != rowBytes(src) {
		return status.Errorf(status.InvalidArgument,
			"%s: rows of dst %v and src %v differ; give both one type and one shape after the first axis", op, dst, src)
	}
	return nil
}

func checkAllToAll(dst, src tensor.Tensor, recvRows, sendRows []int64, size int) error {
	const op = "comm.AllToAll"
	if err := checkRows(op, "src", src, sendRows, size); err != nil {
		return err
	}
	if err := checkRows(op, "dst", dst, recvRows, size); err != nil {
		return err
	}
	if err := sameRows(op, dst, src); err != nil {
		return err
	}
	if overlap(dst.Data, total(recvRows)*rowBytes(dst), src.Data, total(sendRows)*rowBytes(src)) {
		return status.Errorf(status.InvalidArgument, "%s: dst %v and src %v overlap; use two buffers", op, dst, src)
	}
	return nil
}

// checkShards checks the arguments of all-gather and reduce-scatter: whole has the rows of all
// ranks, shard has the rows of this rank. shard may be this rank's block of whole; any other
// overlap is an error.
func checkShards(op, wholeName, shardName string, whole, shard tensor.Tensor, rows []int64, rank, size int) error {
	if err := checkRows(op, wholeName, whole, rows, size); err != nil {
		return err
	}
	if err := checkMemory(op, shardName, shard); err != nil {
		return err
	}
	if err := checkRowCount(op, shardName, shard, rows[rank]); err != nil {
		return err
	}
	if err := sameRows(op, whole, shard); err != nil {
		return err
	}
	row := rowBytes(whole)
	own := blockAt(whole.Data, before(rows, rank)*row, rows[rank]*row)
	if shard.Data != own && overlap(whole.Data, total(rows)*row, shard.Data, rows[rank]*row) {
		return status.Errorf(status.InvalidArgument,
			"%s: %s %v and %s %v overlap; use two buffers, or this rank's block of %s", op, wholeName, whole, shardName,
			shard, wholeName)
	}
	return nil
}

func checkReduce(name string, t tensor.Tensor, op Op) error {
	if err := checkMemory(name, "tensor", t); err != nil {
		return err
	}
	switch t.DType {
	case tensor.F32, tensor.F64, tensor.BF16, tensor.I32, tensor.I64, tensor.Invalid:
	default:
		return status.Errorf(status.Unsupported, "%s: %v cannot be reduced; use F32, F64, BF16, I32 or I64", name, t)
	}
	if op > Min {
		return status.Errorf(status.InvalidArgument, "%s: reduction %d is unknown; use Sum, Max or Min", name, op)
	}
	return nil
}

func checkSendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to, size int) error {
	const op = "comm.SendRecv"
	if err := checkMemory(op, "recv", recv); err != nil {
		return err
	}
	if err := checkMemory(op, "send", send); err != nil {
		return err
	}
	if from >= size || to >= size {
		return status.Errorf(status.InvalidArgument, "%s: from rank %d, to rank %d, of %d ranks; ranks are 0 to %d", op,
			from, to, size, size-1)
	}
	return nil
}

func checkRoot(root, size int) error {
	if root < 0 || root >= size {
		return status.Errorf(status.InvalidArgument, "comm.Broadcast: root %d of %d ranks; ranks are 0 to %d", root,
			size, size-1)
	}
	return nil
}
