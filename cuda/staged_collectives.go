package cuda

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// Collectives of the staged transport. They run in chunks.

func (c *staged) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	n, elem, x := t.Numel(), t.DType.Size(), address(t.Data)
	if c.host.Size() == 1 || t.Bytes() == 0 {
		return c.empty("AllReduce", s)
	}
	caller, err := c.enter("AllReduce", s)
	if err != nil {
		return err
	}
	step := max(c.chunk/elem, 1)
	extent := func(k int64) int64 { return min(step, n-k*step) }
	at := func(k int64) uintptr { return x + uintptr(k*step*elem) }
	err = c.pipeline(ceil(n, step), min(step, n)*elem,
		func(k int64, p *pinned) error { return c.copy(p.at(0), at(k), extent(k)*elem) },
		func(k int64, p *pinned) error { return c.host.AllReduce(nil, p.tensor(0, t.DType, extent(k)), op) },
		func(k int64, p *pinned) error { return c.copy(at(k), p.at(0), extent(k)*elem) })
	if err != nil {
		return err
	}
	return c.leave(caller)
}

// empty is an operation without data, which only orders the streams.
func (l *commStream) empty(op string, s device.Stream) error {
	caller, err := l.enter(op, s)
	if err != nil {
		return err
	}
	return l.leave(caller)
}

// chunks divides the blocks of all ranks into chunks: chunk k has units [k·step, (k+1)·step) of
// each block. All ranks know all sizes, so they compute the same chunks.
type chunks struct {
	rows     []int64 // by rank: units of its block
	current  []int64 // by rank: units in the chunk of the last selectChunk
	unit     int64   // bytes of a unit
	step     int64   // units of a block in a chunk
	n        int64   // chunks
	capacity int64   // maximum bytes of a chunk, over all ranks
}

func newChunks(rows []int64, unit int64, current []int64, capacity int64) chunks {
	x := chunks{rows: rows, current: current, unit: unit}
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

// selectChunk sets current to the units of each rank in chunk k, and returns their sum.
func (x *chunks) selectChunk(k int64) (total int64) {
	for j, r := range x.rows {
		x.current[j] = max(0, min(x.step, r-k*x.step))
		total += x.current[j]
	}
	return total
}

func (c *staged) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("AllGather", s)
	if err != nil {
		return err
	}
	me, n, row := c.host.Rank(), c.host.Size(), comm.RowBytes(dst)
	to, from := address(dst.Data), address(src.Data)
	block := to + uintptr(comm.RowsBefore(rows, me)*row)
	if err := c.commStream.copy(block, from, rows[me]*row); err != nil {
		return err
	}
	x := newChunks(rows, row, c.rows[:n], c.chunk)
	if n == 1 {
		x.n = 0
	}
	toHost := func(k int64, p *pinned) error {
		x.selectChunk(k)
		return c.copy(p.at(comm.RowsBefore(x.current, me)*row), from+uintptr(k*x.step*row), x.current[me]*row)
	}
	onHost := func(k int64, p *pinned) error {
		total := x.selectChunk(k)
		return c.host.AllGather(nil, p.tensor(0, tensor.U8, total, row),
			p.tensor(comm.RowsBefore(x.current, me)*row, tensor.U8, x.current[me], row), x.current)
	}
	toDevice := func(k int64, p *pinned) error {
		x.selectChunk(k)
		for j := range n {
			if j == me {
				continue
			}
			at := (comm.RowsBefore(rows, j) + k*x.step) * row
			if err := c.copy(to+uintptr(at), p.at(comm.RowsBefore(x.current, j)*row), x.current[j]*row); err != nil {
				return err
			}
		}
		return nil
	}
	if err := c.pipeline(x.n, x.capacity, toHost, onHost, toDevice); err != nil {
		return err
	}
	return c.leave(caller)
}

func (c *staged) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("ReduceScatter", s)
	if err != nil {
		return err
	}
	me, n, row := c.host.Rank(), c.host.Size(), comm.RowBytes(src)
	to, from := address(dst.Data), address(src.Data)
	if n == 1 {
		if err := c.copy(to, from, rows[0]*row); err != nil {
			return err
		}
		return c.leave(caller)
	}
	x := newChunks(rows, row, c.rows[:n], c.chunk)
	width := int64(0) // elements of a row
	if row > 0 {
		width = row / src.DType.Size()
	}
	toHost := func(k int64, p *pinned) error {
		x.selectChunk(k)
		for j := range n {
			at := (comm.RowsBefore(rows, j) + k*x.step) * row
			if err := c.copy(p.at(comm.RowsBefore(x.current, j)*row), from+uintptr(at), x.current[j]*row); err != nil {
				return err
			}
		}
		return nil
	}
	onHost := func(k int64, p *pinned) error {
		total := x.selectChunk(k)
		return c.host.ReduceScatter(nil, p.tensor(comm.RowsBefore(x.current, me)*row, src.DType, x.current[me], width),
			p.tensor(0, src.DType, total, width), x.current)
	}
	toDevice := func(k int64, p *pinned) error {
		x.selectChunk(k)
		return c.copy(to+uintptr(k*x.step*row), p.at(comm.RowsBefore(x.current, me)*row), x.current[me]*row)
	}
	if err := c.pipeline(x.n, x.capacity, toHost, onHost, toDevice); err != nil {
		return err
	}
	return c.leave(caller)
}

func (c *staged) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	caller, err := c.enter("Broadcast", s)
	if err != nil {
		return err
	}
	x, bytes, isRoot := address(t.Data), t.Bytes(), c.host.Rank() == root
	extent := func(k int64) int64 { return min(c.chunk, bytes-k*c.chunk) }
	n := ceil(bytes, c.chunk)
	if c.host.Size() == 1 {
		n = 0
	}
	toHost := func(k int64, p *pinned) error {
		if !isRoot {
			return nil
		}
		return c.copy(p.at(0), x+uintptr(k*c.chunk), extent(k))
	}
	onHost := func(k int64, p *pinned) error {
		return c.host.Broadcast(nil, p.tensor(0, tensor.U8, extent(k)), root)
	}
	toDevice := func(k int64, p *pinned) error {
		if isRoot {
			return nil
		}
		return c.copy(x+uintptr(k*c.chunk), p.at(0), extent(k))
	}
	if err := c.pipeline(n, min(bytes, c.chunk), toHost, onHost, toDevice); err != nil {
		return err
	}
	return c.leave(caller)
}

// SendRecv has in each chunk one message in each direction. A direction without bytes has one
// message of 0 bytes, as with the host's communicator.
func (c *staged) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
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
		if err := c.copy(address(recv.Data), address(send.Data), in); err != nil {
			return err
		}
		return c.leave(caller)
	}
	half := c.chunk / 2
	sends, receives := max(ceil(out, half), 1), max(ceil(in, half), 1)
	if to < 0 {
		sends = 0
	}
	if from < 0 {
		receives = 0
	}
	bytesIn := func(k, all int64) int64 { return max(0, min(half, all-k*half)) }
	toHost := func(k int64, p *pinned) error {
		return c.copy(p.at(0), address(send.Data)+uintptr(k*half), bytesIn(k, out))
	}
	onHost := func(k int64, p *pinned) error {
		source, target := from, to
		if k >= sends {
			target = -1
		}
		if k >= receives {
			source = -1
		}
		return c.host.SendRecv(nil, p.tensor(half, tensor.U8, bytesIn(k, in)), source,
			p.tensor(0, tensor.U8, bytesIn(k, out)), target)
	}
	toDevice := func(k int64, p *pinned) error {
		return c.copy(address(recv.Data)+uintptr(k*half), p.at(half), bytesIn(k, in))
	}
	if err := c.pipeline(max(sends, receives), 2*half, toHost, onHost, toDevice); err != nil {
		return err
	}
	return c.leave(caller)
}
