package comm

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// ready waits for what the stream has still to write; memory of the host is then good to send.
func ready(s device.Stream) error {
	if s == nil {
		return nil
	}
	return s.Sync()
}

// usable refuses what a host communicator cannot read or write.
func usable(op, name string, t tensor.Tensor) error {
	switch {
	case t.IsNil():
		return nil
	case t.Where != tensor.Host:
		return status.Errorf(status.Unsupported, "%s: %s %v is in device memory: this communicator moves host memory only", op, name, t)
	case !t.Contiguous():
		return status.Errorf(status.InvalidArgument, "%s: %s %v is not dense: copy it first", op, name, t)
	case t.Data == nil && t.Bytes() > 0:
		return status.Errorf(status.InvalidArgument, "%s: %s %v has no memory", op, name, t)
	}
	return nil
}

// usableRows refuses counts that do not fit the ranks or the tensor. A tensor may hold more rows
// than are moved.
func usableRows(op, name string, t tensor.Tensor, rows []int64, size int) error {
	if err := usable(op, name, t); err != nil {
		return err
	}
	if len(rows) != size {
		return status.Errorf(status.InvalidArgument, "%s: %d row counts for %s, %d ranks: give one for each rank", op, len(rows), name, size)
	}
	for j, r := range rows {
		if r < 0 {
			return status.Errorf(status.InvalidArgument, "%s: %d rows of %s for rank %d", op, r, name, j)
		}
	}
	return holds(op, name, t, total(rows))
}

func holds(op, name string, t tensor.Tensor, rows int64) error {
	var have int64
	if !t.IsNil() {
		if t.NDim == 0 {
			return status.Errorf(status.InvalidArgument, "%s: %s is a scalar and has no rows: give it one axis", op, name)
		}
		have = t.Shape[0]
	}
	if rows > have {
		return status.Errorf(status.InvalidArgument, "%s: %d rows of %s %v", op, rows, name, t)
	}
	return nil
}

// sameRows refuses two tensors whose rows are of different types or widths.
func sameRows(op string, dst, src tensor.Tensor) error {
	if dst.IsNil() || src.IsNil() {
		return nil
	}
	if dst.DType != src.DType || rowBytes(dst) != rowBytes(src) {
		return status.Errorf(status.InvalidArgument, "%s: rows of dst %v and src %v differ", op, dst, src)
	}
	return nil
}

func checkAllToAll(dst, src tensor.Tensor, recvRows, sendRows []int64, size int) error {
	const op = "comm.AllToAll"
	if err := usableRows(op, "src", src, sendRows, size); err != nil {
		return err
	}
	if err := usableRows(op, "dst", dst, recvRows, size); err != nil {
		return err
	}
	if err := sameRows(op, dst, src); err != nil {
		return err
	}
	if overlap(dst.Data, total(recvRows)*rowBytes(dst), src.Data, total(sendRows)*rowBytes(src)) {
		return status.Errorf(status.InvalidArgument, "%s: dst %v and src %v overlap: use two buffers", op, dst, src)
	}
	return nil
}

// checkShards serves all-gather and reduce-scatter: whole has the rows of all ranks, part those of
// this one. The part may be the very place in whole where it belongs; any other overlap is refused.
func checkShards(op, wholeName, partName string, whole, part tensor.Tensor, rows []int64, rank, size int) error {
	if err := usableRows(op, wholeName, whole, rows, size); err != nil {
		return err
	}
	if err := usable(op, partName, part); err != nil {
		return err
	}
	if err := holds(op, partName, part, rows[rank]); err != nil {
		return err
	}
	if err := sameRows(op, whole, part); err != nil {
		return err
	}
	row := rowBytes(whole)
	own := place(whole.Data, before(rows, rank)*row, rows[rank]*row)
	if part.Data != own && overlap(whole.Data, total(rows)*row, part.Data, rows[rank]*row) {
		return status.Errorf(status.InvalidArgument, "%s: %s %v and %s %v overlap: use two buffers, or the part's own place", op, wholeName, whole, partName, part)
	}
	return nil
}

func checkReduce(name string, t tensor.Tensor, op Op) error {
	if err := usable(name, "tensor", t); err != nil {
		return err
	}
	switch t.DType {
	case tensor.F32, tensor.F64, tensor.BF16, tensor.I32, tensor.I64, tensor.Invalid:
	default:
		return status.Errorf(status.Unsupported, "%s: %v: only F32, F64, BF16, I32 and I64 are reduced", name, t)
	}
	if op > Min {
		return status.Errorf(status.InvalidArgument, "%s: reduction %d: use Sum, Max or Min", name, op)
	}
	return nil
}

func checkSendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to, size int) error {
	const op = "comm.SendRecv"
	if err := usable(op, "recv", recv); err != nil {
		return err
	}
	if err := usable(op, "send", send); err != nil {
		return err
	}
	if from >= size || to >= size {
		return status.Errorf(status.InvalidArgument, "%s: from %d to %d of %d ranks", op, from, to, size)
	}
	return nil
}

func checkRoot(root, size int) error {
	if root < 0 || root >= size {
		return status.Errorf(status.InvalidArgument, "comm.Broadcast: root %d of %d ranks", root, size)
	}
	return nil
}
