package sp

import (
	"slices"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Halo is the rows beside a rank's own that belong to the same document: what a convolution or a
// shift looks at across the cut. They come from as many ranks as it takes.
type Halo struct {
	// so many rows before this rank's first (N > 0), or behind its last (N < 0)
	N         int64
	X         tensor.Tensor // [B, rows, W], this rank's; last axis dense
	Rows      tensor.Tensor // [B, |N|, W], in the order of the sequence; last axis dense
	Workspace tensor.Tensor // U8, HaloElements of X's type

	Admit Admit

	send, recv []int64
}

// haloOf is the rows of sequence i that a rank needs from others, and where the first of them lies
// in its halo.
func (b *Batch) haloOf(n, i int64, rank int) (lo, hi, place int64) {
	first, end := b.RankRows(rank)
	if first == end {
		return 0, 0, 0
	}
	cu, base := b.queries.cu, i*b.queries.n
	if n > 0 {
		doc, _ := slices.BinarySearch(cu, base+first+1) // the first start behind the row
		lo = max(0, first-n, cu[doc-1]-base)
		return lo, first, lo - (first - n)
	}
	doc, _ := slices.BinarySearch(cu, base+end)
	return end, min(b.queries.n, end-n, cu[doc]-base), 0
}

// haloFrom is the part of that which another rank has.
func (b *Batch) haloFrom(n, i int64, rank, from int) (lo, hi, place int64) {
	lo, hi, place = b.haloOf(n, i, rank)
	first, end := b.RankRows(from)
	at := max(lo, first)
	return at, max(at, min(hi, end)), place + at - lo
}

// haloRows is the rows that one rank gives to another's halo, over all sequences.
func (b *Batch) haloRows(n int64, to, from int) (rows int64) {
	for i := range b.spec.Batch {
		lo, hi, _ := b.haloFrom(n, i, to, from)
		rows += hi - lo
	}
	return rows
}

// HaloElements is what a rank sends of its rows, width elements each, and receives into its halo;
// Backward sends the second.
func (b *Batch) HaloElements(rank int, n, width int64) (send, recv int64) {
	for r := range b.Size() {
		if r != rank {
			send += b.haloRows(n, r, rank) * width
			recv += b.haloRows(n, rank, r) * width
		}
	}
	return send, recv
}

// count fills the counts of the exchange.
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
		return status.Errorf(status.InvalidArgument, "%s: n is 0: give the rows of the halo, less than 0 for those behind", op)
	}
	send, recv := b.HaloElements(int(b.rank), h.N, h.X.Shape[2])
	return checkBytes(op, "workspace", h.Workspace, (send+recv)*h.X.DType.Size())
}

// Forward fills Rows, with zeros where the document has none. Collective, one exchange. It
// allocates nothing but the first time.
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
	if err := h.mine(d, s, b, 0, toWire); err != nil {
		return err
	}
	if err := h.exchange(c, s, send, recv, h.send, h.recv); err != nil {
		return err
	}
	return h.theirs(d, s, b, send, fromWire)
}

// Backward adds to X, a gradient, what other ranks have in their Rows for it: the adjoint of
// Forward. Collective, one exchange.
func (h *Halo) Backward(d device.Device, c comm.Comm, s device.Stream, b *Batch) error {
	if err := h.Admit.Result(h.check("sp.Halo.Backward", b)); err != nil {
		return err
	}
	send, recv := h.count(b)
	if err := h.theirs(d, s, b, 0, toWire); err != nil {
		return err
	}
	if err := h.exchange(c, s, recv, send, h.recv, h.send); err != nil {
		return err
	}
	return h.mine(d, s, b, recv, addWire)
}

// wireStep is what happens to a block of rows here and its place on the wire.
type wireStep func(d device.Device, s device.Stream, local, wire tensor.Tensor) error

func toWire(d device.Device, s device.Stream, local, wire tensor.Tensor) error {
	return d.Copy(s, wire, local)
}

func fromWire(d device.Device, s device.Stream, local, wire tensor.Tensor) error {
	return d.Copy(s, local, wire)
}

func addWire(d device.Device, s device.Stream, local, wire tensor.Tensor) error {
	return d.Add(s, local, local, wire)
}

// mine walks this rank's rows that are in the halos of others, in the order of the wire, which they
// are on from element at on.
func (h *Halo) mine(d device.Device, s device.Stream, b *Batch, at int64, do wireStep) error {
	me := int(b.rank)
	for r := range b.Size() {
		for i := range b.spec.Batch {
			lo, hi, _ := b.haloFrom(h.N, i, r, me)
			if hi == lo {
				continue
			}
			local := h.X.Select(0, i).Slice(0, lo-b.Lo(), hi-b.Lo())
			if err := do(d, s, local, h.onWire(at, local)); err != nil {
				return err
			}
			at += local.Numel()
		}
	}
	return nil
}

// theirs walks the rows of this rank's halo likewise.
func (h *Halo) theirs(d device.Device, s device.Stream, b *Batch, at int64, do wireStep) error {
	for r := range b.Size() {
		for i := range b.spec.Batch {
			lo, hi, place := b.haloFrom(h.N, i, int(b.rank), r)
			if hi == lo {
				continue
			}
			local := h.Rows.Select(0, i).Slice(0, place, place+hi-lo)
			if err := do(d, s, local, h.onWire(at, local)); err != nil {
				return err
			}
			at += local.Numel()
		}
	}
	return nil
}

// onWire is the place of a block on the wire, from an element on.
func (h *Halo) onWire(at int64, local tensor.Tensor) tensor.Tensor {
	return h.Workspace.At(at*h.X.DType.Size(), h.X.DType, local.Shape[0], local.Shape[1])
}

func (h *Halo) exchange(c comm.Comm, s device.Stream, sent, received int64, send, recv []int64) error {
	if c.Size() == 1 {
		return nil
	}
	wire, dtype := bytesOf(h.Workspace), h.X.DType
	if h.Workspace.IsNil() {
		wire.Where = h.Rows.Where // a rank that sends nothing meets the others in the same exchange
	}
	return c.AllToAll(s, wire.At(sent*dtype.Size(), dtype, received), wire.At(0, dtype, sent), recv, send)
}
