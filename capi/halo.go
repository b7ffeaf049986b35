package main

import (
	"slices"
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// halo is one call: n rows before (n > 0) or after this rank's.
type halo struct {
	c       *context
	b       *sp.Batch
	n       int64
	x, rows tensor.Tensor // [B, rows, W], [B, |n|, W]
	wire    tensor.Tensor
	width   int64
}

// wants is the rows of sequence i that rank r needs from others, and where the first of them lies in its halo.
func (h *halo) wants(i int64, r int) (lo, hi, place int64) {
	first, end := h.b.RankRows(r)
	if first == end {
		return 0, 0, 0
	}
	cu, _ := h.b.Documents()
	base := i * h.b.Seq()
	if h.n > 0 {
		doc, _ := slices.BinarySearch(cu, base+first+1) // the first start behind the row
		lo = max(0, first-h.n, cu[doc-1]-base)
		return lo, first, lo - (first - h.n)
	}
	doc, _ := slices.BinarySearch(cu, base+end)
	return end, min(h.b.Seq(), end-h.n, cu[doc]-base), 0
}

// from is the part of that which rank j has.
func (h *halo) from(i int64, r, j int) (lo, hi, place int64) {
	lo, hi, place = h.wants(i, r)
	first, end := h.b.RankRows(j)
	from := max(lo, first)
	return from, max(from, min(hi, end)), place + from - lo
}

// count fills the counts of the exchange: what ranks send of their rows, and receive into their halos, in elements.
func (h *halo) count() (send, recv int64) {
	c, me := h.c, h.c.comm.Rank()
	c.send, c.recv = c.send[:0], c.recv[:0]
	for r := range h.b.Size() {
		var s, g int64
		for i := range h.b.Batch() {
			lo, hi, _ := h.from(i, r, me)
			s += hi - lo
			lo, hi, _ = h.from(i, me, r)
			g += hi - lo
		}
		c.send, c.recv = append(c.send, s*h.width), append(c.recv, g*h.width)
		send, recv = send+s*h.width, recv+g*h.width
	}
	return send, recv
}

// each walks the blocks that this rank has on its side of the exchange, in the order of the wire.
func (h *halo) each(mine bool, at int64, do func(local, wire tensor.Tensor) error) error {
	me := h.c.comm.Rank()
	size := h.x.DType.Size()
	first, _ := h.b.RankRows(me)
	for r := range h.b.Size() {
		for i := range h.b.Batch() {
			var local tensor.Tensor
			if mine { // my rows, for rank r's halo
				lo, hi, _ := h.from(i, r, me)
				if hi == lo {
					continue
				}
				local = h.x.Select(0, i).Slice(0, lo-first, hi-first)
			} else {
				lo, hi, place := h.from(i, me, r)
				if hi == lo {
					continue
				}
				local = h.rows.Select(0, i).Slice(0, place, place+hi-lo)
			}
			if err := do(local, h.wire.At(at*size, h.x.DType, local.Shape[0], local.Shape[1])); err != nil {
				return err
			}
			at += local.Numel()
		}
	}
	return nil
}

// readHalo checks a call; without data, shapes alone count.
func readHalo(op string, ch, bh uintptr, args unsafe.Pointer, forward, data bool) (h *halo, a cHalo, err error) {
	c, err := find[context](op, aContext, ch)
	if err != nil {
		return nil, a, err
	}
	b, err := find[batch](op, aBatch, bh)
	if err != nil {
		return h, a, err
	}
	if b.ctx != c {
		return h, a, invalid("%s: the batch was made on another context", op)
	}
	if err := c.enter(op); err != nil {
		return h, a, err
	}
	h = &c.halo
	*h = halo{c: c, b: b.own}
	if a, err = read[cHalo](op, "args", args); err != nil {
		return h, a, err
	}
	h.n = a.n
	if h.n == 0 || h.n < -maxTokens || h.n > maxTokens || a.reserved != 0 {
		return h, a, invalid("%s: n is %d, reserved %d: n > 0 for rows before, < 0 for rows after, and 0", op, h.n, a.reserved)
	}
	c.shapesOnly = !data
	defer func() { c.shapesOnly = false }()
	r := tensors{c: c, op: op}
	r.get(&h.x, "x", a.x, 0, !forward)
	r.get(&h.rows, "halo", a.halo, 0, forward)
	if r.err != nil {
		return h, a, r.err
	}
	if !slices.Contains(c.dev.Info().Compute, h.x.DType) {
		return h, a, unbuilt("%s: x is %v: a halo is of %v here", op, h.x, c.dev.Info().Compute)
	}
	for _, t := range [...]struct {
		name string
		t    *tensor.Tensor
		rows int64
	}{{"x", &h.x, b.own.Rows()}, {"halo", &h.rows, max(h.n, -h.n)}} {
		if t.t.NDim < 2 || t.t.NDim != h.x.NDim || t.t.DType != h.x.DType || t.t.Shape[0] != b.own.Batch() || t.t.Shape[1] != t.rows ||
			!slices.Equal(t.t.Shape[2:t.t.NDim], h.x.Shape[2:h.x.NDim]) || !t.t.Contiguous() {
			return h, a, invalid("%s: %s is %v: it must be dense [%d, %d, ...], x and halo alike in type and in what follows", op, t.name, *t.t, b.own.Batch(), t.rows)
		}
	}
	h.width = 1
	for _, d := range h.x.Shape[2:h.x.NDim] {
		h.width *= d
	}
	h.x, h.rows = h.x.View(b.own.Batch(), b.own.Rows(), h.width), h.rows.View(b.own.Batch(), max(h.n, -h.n), h.width)
	return h, a, nil
}

// run exchanges: forward sends rows and receives halos, backward the other way round.
func haloCall(op string, ch, bh uintptr, args unsafe.Pointer, forward bool) error {
	h, a, err := readHalo(op, ch, bh, args, forward, true)
	if h != nil {
		defer h.c.leave()
	}
	if err != nil {
		return err
	}
	r := tensors{c: h.c, op: op}
	if r.workspace(&h.wire, a.workspace, uint64(a.workspace_bytes)); r.err != nil {
		return r.err
	}
	if err := h.c.overlaps(op); err != nil {
		return err
	}
	send, recv := h.count()
	dtype := h.x.DType
	if err := sizeOf(op, "workspace", h.wire, (send+recv)*dtype.Size()); err != nil {
		return err
	}
	if h.wire.IsNil() {
		h.wire = h.c.bytes(nil, 0)
	}
	if err := h.c.join(op, a.stream); err != nil {
		return err
	}
	if forward {
		return h.c.part(h.forward(h.c.stream, send, recv))
	}
	return h.c.part(h.backward(h.c.stream, send, recv))
}

func (h *halo) forward(s device.Stream, send, recv int64) error {
	d := h.c.dev
	if err := d.Fill(s, h.rows, 0); err != nil {
		return err
	}
	if err := h.each(true, 0, func(local, wire tensor.Tensor) error { return d.Copy(s, wire, local) }); err != nil {
		return err
	}
	if err := h.exchange(s, send, recv, h.c.send, h.c.recv); err != nil {
		return err
	}
	return h.each(false, send, func(local, wire tensor.Tensor) error { return d.Copy(s, local, wire) })
}

func (h *halo) backward(s device.Stream, send, recv int64) error {
	d := h.c.dev
	if err := h.each(false, 0, func(local, wire tensor.Tensor) error { return d.Copy(s, wire, local) }); err != nil {
		return err
	}
	if err := h.exchange(s, recv, send, h.c.recv, h.c.send); err != nil {
		return err
	}
	return h.each(true, recv, func(local, wire tensor.Tensor) error { return d.Add(s, local, local, wire) })
}

func (h *halo) exchange(s device.Stream, sent, received int64, send, recv []int64) error {
	if h.b.Size() == 1 {
		return nil
	}
	dtype := h.x.DType
	return h.c.comm.AllToAll(s, h.wire.At(sent*dtype.Size(), dtype, received), h.wire.At(0, dtype, sent), recv, send)
}

func haloWorkspace(ch, bh uintptr, args, out unsafe.Pointer) error {
	const op = "ulysses_halo_workspace"
	h, _, err := readHalo(op, ch, bh, args, true, false)
	if h != nil {
		defer h.c.leave()
	}
	if err != nil {
		return err
	}
	if out == nil {
		return invalid("%s: bytes is NULL", op)
	}
	send, recv := h.count()
	n := (send + recv) * h.x.DType.Size()
	*(*uint64)(out) = uint64(n)
	return h.c.asked(n)
}

// lossReduce adds up the group's losses and counts.
func lossReduce(ch uintptr, sum, count, mean unsafe.Pointer) error {
	const op = "ulysses_loss_reduce"
	c, err := find[context](op, aContext, ch)
	if err != nil {
		return err
	}
	if err := c.enter(op); err != nil {
		return err
	}
	defer c.leave()
	if sum == nil || count == nil {
		return invalid("%s: sum or count is NULL", op)
	}
	n := *(*int64)(count)
	if n < 0 || n > 1<<52 {
		return invalid("%s: count is %d: 0 or more, below 2^52", op, n)
	}
	c.loss[0], c.loss[1] = *(*float64)(sum), float64(n)
	if err := c.comm.AllReduce(nil, tensor.OfFloat64(c.loss, 2), comm.Sum); err != nil {
		return err
	}
	*(*float64)(sum), *(*int64)(count) = c.loss[0], int64(c.loss[1])
	if mean != nil {
		*(*float64)(mean) = 0
		if c.loss[1] > 0 {
			*(*float64)(mean) = c.loss[0] / c.loss[1]
		}
	}
	return nil
}
