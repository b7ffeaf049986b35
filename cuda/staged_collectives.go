package cuda

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Collectives through the host, in pieces that all ranks cut alike: all of them know all sizes.

func (c *staged) allReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	n, elem, x := t.Numel(), t.DType.Size(), number(t.Data)
	if c.host.Size() == 1 || t.Bytes() == 0 {
		return c.nothing("AllReduce", s)
	}
	caller, err := c.enter("AllReduce", s)
	if err != nil {
		return err
	}
	step := max(c.piece/elem, 1)
	extent := func(k int64) int64 { return min(step, n-k*step) }
	place := func(k int64) uintptr { return x + uintptr(k*step*elem) }
	err = c.pieces(ceil(n, step), min(step, n)*elem,
		func(k int64, p *pinned) error { return c.copy(p.at(0), place(k), extent(k)*elem) },
		func(k int64, p *pinned) error { return c.host.AllReduce(nil, p.tensor(0, t.DType, extent(k)), op) },
		func(k int64, p *pinned) error { return c.copy(place(k), p.at(0), extent(k)*elem) })
	if err != nil {
		return err
	}
	return c.leave(caller)
}

// nothing is an operation without data: only its order counts.
func (l *commStream) nothing(op string, s device.Stream) error {
	caller, err := l.enter(op, s)
	if err != nil {
		return err
	}
	return l.leave(caller)
}

// cut is how the blocks of all ranks are cut into pieces: of each block the k-th part of step
// units.
type cut struct {
	rows     []int64 // units of each rank's block
	now      []int64 // of them, in the piece that was asked for last
	unit     int64   // bytes
	step     int64   // units of a block in a piece
	n        int64   // pieces
	capacity int64   // bytes of a piece, at most
}

func newCut(rows []int64, unit int64, now []int64, capacity int64) cut {
	x := cut{rows: rows, now: now, unit: unit}
	longest := int64(0)
	for _, r := range rows {
		longest = max(longest, r)
	}
	x.step = max(capacity/max(unit, 1)/int64(len(rows)), 1)
	x.n = ceil(longest, x.step)
	if unit == 0 {
		x.n = 0
	}
	for _, r := range rows {
		x.capacity += min(x.step, r) * unit
	}
	return x
}

// piece lays out piece k: now has the units of each rank.
func (x *cut) piece(k int64) (total int64) {
	for j, r := range x.rows {
		x.now[j] = max(0, min(x.step, r-k*x.step))
		total += x.now[j]
	}
	return total
}

func (c *staged) allGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("AllGather", s)
	if err != nil {
		return err
	}
	me, n, row := c.host.Rank(), c.host.Size(), comm.RowBytes(dst)
	to, from := number(dst.Data), number(src.Data)
	home := to + uintptr(comm.RowsBefore(rows, me)*row)
	if err := c.commStream.copy(home, from, rows[me]*row); err != nil {
		return err
	}
	x := newCut(rows, row, c.parts[:n], c.piece)
	if n == 1 {
		x.n = 0
	}
	down := func(k int64, p *pinned) error {
		x.piece(k)
		return c.copy(p.at(comm.RowsBefore(x.now, me)*row), from+uintptr(k*x.step*row), x.now[me]*row)
	}
	meet := func(k int64, p *pinned) error {
		total := x.piece(k)
		return c.host.AllGather(nil, p.tensor(0, tensor.U8, total, row), p.tensor(comm.RowsBefore(x.now, me)*row, tensor.U8, x.now[me], row), x.now)
	}
	up := func(k int64, p *pinned) error {
		x.piece(k)
		for j := range n {
			if j == me {
				continue
			}
			at := (comm.RowsBefore(rows, j) + k*x.step) * row
			if err := c.copy(to+uintptr(at), p.at(comm.RowsBefore(x.now, j)*row), x.now[j]*row); err != nil {
				return err
			}
		}
		return nil
	}
	if err := c.pieces(x.n, x.capacity, down, meet, up); err != nil {
		return err
	}
	return c.leave(caller)
}

func (c *staged) reduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("ReduceScatter", s)
	if err != nil {
		return err
	}
	me, n, row := c.host.Rank(), c.host.Size(), comm.RowBytes(src)
	to, from := number(dst.Data), number(src.Data)
	if n == 1 {
		if err := c.copy(to, from, rows[0]*row); err != nil {
			return err
		}
		return c.leave(caller)
	}
	x := newCut(rows, row, c.parts[:n], c.piece)
	width := int64(0) // elements of a row
	if row > 0 {
		width = row / src.DType.Size()
	}
	down := func(k int64, p *pinned) error {
		x.piece(k)
		for j := range n {
			at := (comm.RowsBefore(rows, j) + k*x.step) * row
			if err := c.copy(p.at(comm.RowsBefore(x.now, j)*row), from+uintptr(at), x.now[j]*row); err != nil {
				return err
			}
		}
		return nil
	}
	meet := func(k int64, p *pinned) error {
		total := x.piece(k)
		return c.host.ReduceScatter(nil, p.tensor(comm.RowsBefore(x.now, me)*row, src.DType, x.now[me], width), p.tensor(0, src.DType, total, width), x.now)
	}
	up := func(k int64, p *pinned) error {
		x.piece(k)
		return c.copy(to+uintptr(k*x.step*row), p.at(comm.RowsBefore(x.now, me)*row), x.now[me]*row)
	}
	if err := c.pieces(x.n, x.capacity, down, meet, up); err != nil {
		return err
	}
	return c.leave(caller)
}

func (c *staged) broadcast(s device.Stream, t tensor.Tensor, root int) error {
	caller, err := c.enter("Broadcast", s)
	if err != nil {
		return err
	}
	x, bytes, mine := number(t.Data), t.Bytes(), c.host.Rank() == root
	extent := func(k int64) int64 { return min(c.piece, bytes-k*c.piece) }
	n := ceil(bytes, c.piece)
	if c.host.Size() == 1 {
		n = 0
	}
	down := func(k int64, p *pinned) error {
		if !mine {
			return nil
		}
		return c.copy(p.at(0), x+uintptr(k*c.piece), extent(k))
	}
	meet := func(k int64, p *pinned) error {
		return c.host.Broadcast(nil, p.tensor(0, tensor.U8, extent(k)), root)
	}
	up := func(k int64, p *pinned) error {
		if mine {
			return nil
		}
		return c.copy(x+uintptr(k*c.piece), p.at(0), extent(k))
	}
	if err := c.pieces(n, min(bytes, c.piece), down, meet, up); err != nil {
		return err
	}
	return c.leave(caller)
}

// sendRecv has in each piece one message each way; a way without bytes has one message, as with the
// host.
func (c *staged) sendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	caller, err := c.enter("SendRecv", s)
	if err != nil {
		return err
	}
	out, in := send.Bytes(), recv.Bytes()
	if to < 0 {
		out = 0
	}
	if from < 0 {
		in = 0
	}
	if to == c.host.Rank() && from == to {
		if out != in {
			return status.Errorf(status.InvalidArgument, "comm.SendRecv: rank %d sends itself %v and expects %v", to, send, recv)
		}
		if err := c.copy(number(recv.Data), number(send.Data), in); err != nil {
			return err
		}
		return c.leave(caller)
	}
	half := c.piece / 2
	sends, receives := max(ceil(out, half), 1), max(ceil(in, half), 1)
	if to < 0 {
		sends = 0
	}
	if from < 0 {
		receives = 0
	}
	part := func(k, all int64) int64 { return max(0, min(half, all-k*half)) }
	down := func(k int64, p *pinned) error {
		return c.copy(p.at(0), number(send.Data)+uintptr(k*half), part(k, out))
	}
	meet := func(k int64, p *pinned) error {
		source, target := from, to
		if k >= sends {
			target = -1
		}
		if k >= receives {
			source = -1
		}
		return c.host.SendRecv(nil, p.tensor(half, tensor.U8, part(k, in)), source, p.tensor(0, tensor.U8, part(k, out)), target)
	}
	up := func(k int64, p *pinned) error {
		return c.copy(number(recv.Data)+uintptr(k*half), p.at(half), part(k, in))
	}
	if err := c.pieces(max(sends, receives), 2*half, down, meet, up); err != nil {
		return err
	}
	return c.leave(caller)
}
