package sp

import (
	"slices"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Halo has the rows next to a rank's own rows that belong to the same document: the input of a
// convolution or a shift beyond the rank's shard. They may be on several ranks.
type Halo struct {
	// N rows before this rank's first row (N > 0), or -N rows behind its last (N < 0)
	N         int64
	X         tensor.Tensor // [B, rows, W], this rank's rows; last axis dense
	Rows      tensor.Tensor // [B, |N|, W], in the order of the sequence; last axis dense
	Workspace tensor.Tensor // U8, HaloElements of X's type

	Admit Admit

	send, recv []int64
}

// haloOf returns the rows [lo, hi) of sequence i that a rank needs from other ranks, and the offset
// of the first of them in its halo.
func (b *Batch) haloOf(n, i int64, rank int) (lo, hi, offset int64) {
	first, end := b.RankRows(rank)
	if first == end {
		return 0, 0, 0
	}
	cu, base := b.queries.cu, i*b.queries.n
	if n > 0 {
		// the first document that starts behind the row
		doc, _ := slices.BinarySearch(cu, base+first+1)
		lo = max(0, first-n, cu[doc-1]-base)
		return lo, first, lo - (first - n)
	}
	doc, _ := slices.BinarySearch(cu, base+end)
	return end, min(b.queries.n, end-n, cu[doc]-base), 0
}

// haloFrom returns the rows of haloOf that rank from has.
func (b *Batch) haloFrom(n, i int64, rank, from int) (lo, hi, offset int64) {
	lo, hi, offset = b.haloOf(n, i, rank)
	first, end := b.RankRows(from)
	at := max(lo, first)
	return at, max(at, min(hi, end)), offset + at - lo
}

// haloRows returns the number of rows that one rank sends to another's halo, over all sequences.
func (b *Batch) haloRows(n int64, to, from int) (rows int64) {
	for i := range b.spec.Batch {
		lo, hi, _ := b.haloFrom(n, i, to, from)
		rows += hi - lo
	}
	return rows
}

// HaloElements returns the elements that a rank sends and receives in Forward, with width elements
// in each row. Backward sends recv and receives send. Not collective.
func (b *Batch) HaloElements(rank int, n, width int64) (send, recv int64) {
	step := 1 // to the ranks whose halos reach back to this rank's rows
	if n < 0 {
		step = -1
	}
	first, end := b.RankRows(rank)
	for r := rank + step; r >= 0 && r < b.Size(); r += step {
		lo, hi := b.RankRows(r)
		if !b.spec.Zigzag && (n > 0 && lo-n >= end || n < 0 && hi-n <= first) {
			break // neither do the halos of the ranks behind
		}
		send += b.haloRows(n, r, rank) * width
	}
	for i := range b.spec.Batch {
		lo, hi, _ := b.haloOf(n, i, rank)
		recv += (hi - lo) * width
	}
	return send, recv
}

// count sets the counts of the all-to-all.
func (h *Halo) count(b *Batch) (send, recv int64) {
	me, width := int(b.rank), h.X.Shape[2]
	h.send, h.recv = h.send[:0], h.recv[:0]
	for r := range b.Size() {
		h.send = append(h.send, b.haloRows(h.N, r, me)*width)
		h.recv = append(h.recv, b.haloRows(h.N, me, r)*width)
	}
	return b.HaloElements(me, h.N, width)
}

func (h *Halo) check(op string, b *Batch) error {
	n := max(h.N, -h.N)
	for _, t := range [...]struct {
		name string
		t    tensor.Tensor
		rows int64
	}{{"x", h.X, b.Rows()}, {"rows", h.Rows, n}} {
		if err := checkTensor(op, t.name, t.t, h.X.DType, b.spec.Batch, t.rows, h.X.Shape[2]); err != nil {
			return err
		}
	}
	if n == 0 {
		return status.Errorf(status.InvalidArgument,
			"%s: n is 0; give the number of rows, negative for rows behind this rank's own", op)
	}
	send, recv := b.HaloElements(int(b.rank), h.N, h.X.Shape[2])
	return CheckBytes(op, "workspace", h.Workspace, (send+recv)*h.X.DType.Size())
}

// Forward writes Rows, with zeros for rows outside of the document. It allocates only in the first
// call. Collective over c, with one all-to-all.
func (h *Halo) Forward(d device.Device, c comm.Comm, s device.Stream, b *Batch) error {
	if err := h.Admit.Result(h.check("sp.Halo.Forward", b)); err != nil {
		return err
	}
	if h.Rows.Numel() > 0 {
		if err := d.Fill(s, h.Rows, 0); err != nil {
			return err
		}
	}
	send, recv := h.count(b)
	if err := h.visitOwn(d, s, b, 0, toWire); err != nil {
		return err
	}
	if err := h.allToAll(c, s, send, recv, h.send, h.recv); err != nil {
		return err
	}
	return h.visitHalo(d, s, b, send, fromWire)
}

// Backward adds to X, a gradient, the Rows of other ranks that belong to it: the adjoint of
// Forward. Collective over c, with one all-to-all.
func (h *Halo) Backward(d device.Device, c comm.Comm, s device.Stream, b *Batch) error {
	if err := h.Admit.Result(h.check("sp.Halo.Backward", b)); err != nil {
		return err
	}
	send, recv := h.count(b)
	if err := h.visitHalo(d, s, b, 0, toWire); err != nil {
		return err
	}
	if err := h.allToAll(c, s, recv, send, h.recv, h.send); err != nil {
		return err
	}
	return h.visitOwn(d, s, b, recv, addWire)
}

// blockAction copies or adds between a block of rows and its block on the wire.
type blockAction func(d device.Device, s device.Stream, local, wire tensor.Tensor) error

func toWire(d device.Device, s device.Stream, local, wire tensor.Tensor) error {
	return d.Copy(s, wire, local)
}

func fromWire(d device.Device, s device.Stream, local, wire tensor.Tensor) error {
	return d.Copy(s, local, wire)
}

func addWire(d device.Device, s device.Stream, local, wire tensor.Tensor) error {
	return d.Add(s, local, local, wire)
}

// visitOwn calls do for this rank's rows in the halos of other ranks, in the order of the wire,
// where they start at element at.
func (h *Halo) visitOwn(d device.Device, s device.Stream, b *Batch, at int64, do blockAction) error {
	me := int(b.rank)
	for r := range b.Size() {
		for i := range b.spec.Batch {
			lo, hi, _ := b.haloFrom(h.N, i, r, me)
			if hi == lo {
				continue
			}
			local := h.X.Select(0, i).Slice(0, lo-b.Lo(), hi-b.Lo())
			if err := do(d, s, local, h.wireBlock(at, local)); err != nil {
				return err
			}
			at += local.Numel()
		}
	}
	return nil
}

// visitHalo calls do for the rows of this rank's halo, in the order of the wire, where they start
// at element at.
func (h *Halo) visitHalo(d device.Device, s device.Stream, b *Batch, at int64, do blockAction) error {
	for r := range b.Size() {
		for i := range b.spec.Batch {
			lo, hi, offset := b.haloFrom(h.N, i, int(b.rank), r)
			if hi == lo {
				continue
			}
			local := h.Rows.Select(0, i).Slice(0, offset, offset+hi-lo)
			if err := do(d, s, local, h.wireBlock(at, local)); err != nil {
				return err
			}
			at += local.Numel()
		}
	}
	return nil
}

// wireBlock returns the block of the wire that starts at an element, in the shape of local.
func (h *Halo) wireBlock(at int64, local tensor.Tensor) tensor.Tensor {
	return h.Workspace.At(at*h.X.DType.Size(), h.X.DType, local.Shape[0], local.Shape[1])
}

func (h *Halo) allToAll(c comm.Comm, s device.Stream, sent, received int64, send, recv []int64) error {
	if c.Size() == 1 {
		return nil
	}
	wire, dtype := bytesOf(h.Workspace), h.X.DType
	if h.Workspace.IsNil() {
		// select the device's communicator also on a rank that sends nothing
		wire.Where = h.Rows.Where
	}
	return c.AllToAll(s, wire.At(sent*dtype.Size(), dtype, received), wire.At(0, dtype, sent), recv, send)
}
