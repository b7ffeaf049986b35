package main

import (
	"slices"
	"unsafe"

	"ulysses/comm"
	"ulysses/sp"
	"ulysses/tensor"
)

// halo is one call.
type halo struct {
	c    *context
	b    *sp.Batch
	rows sp.Halo
}

// readHalo checks a call; without data, shapes alone count.
func readHalo(op string, ch, bh uintptr, args unsafe.Pointer, forward, data bool) (h *halo, a cHaloArgs, err error) {
	c, err := find[context](op, aContext, ch)
	if err != nil {
		return nil, a, err
	}
	if err := c.enter(op); err != nil {
		return nil, a, err
	}
	return c.readHalo(op, bh, args, forward, data)
}

// readHalo is the function of the same name, on a context that was entered.
func (c *context) readHalo(op string, bh uintptr, args unsafe.Pointer, forward, data bool) (h *halo, a cHaloArgs, err error) {
	h = &c.halo
	h.c, h.rows.Admit = c, c.admit
	b, err := find[batch](op, aBatch, bh)
	if err != nil {
		return h, a, err
	}
	if b.ctx != c {
		return h, a, invalid("%s: the batch was made on another context", op)
	}
	h.b = b.own
	c.must("the number of the batch", b.number)
	x, rows := &h.rows.X, &h.rows.Rows
	*x, *rows, h.rows.Workspace = tensor.Tensor{}, tensor.Tensor{}, tensor.Tensor{}
	if a, err = read[cHaloArgs](op, "args", args); err != nil {
		return h, a, err
	}
	h.rows.N = a.n
	c.must("n", a.n)
	if a.n == 0 || a.n < -maxTokens || a.n > maxTokens || a.reserved != 0 {
		return h, a, invalid("%s: n is %d, reserved %d: n > 0 for rows before, < 0 for rows after, and 0", op, a.n, a.reserved)
	}
	c.shapesOnly = !data
	defer func() { c.shapesOnly = false }()
	r := tensors{c: c, op: op}
	r.get(x, "x", a.x, 0, !forward)
	r.get(rows, "halo", a.halo, 0, forward)
	if r.err != nil {
		return h, a, r.err
	}
	if !slices.Contains(c.dev.Info().Compute, x.DType) {
		return h, a, unbuilt("%s: x is %v: a halo is of %v here", op, *x, c.dev.Info().Compute)
	}
	for _, t := range [...]struct {
		name string
		t    *tensor.Tensor
		rows int64
	}{{"x", x, b.own.Rows()}, {"halo", rows, max(a.n, -a.n)}} {
		if t.t.NDim < 2 || t.t.NDim != x.NDim || t.t.DType != x.DType || t.t.Shape[0] != b.own.Batch() || t.t.Shape[1] != t.rows ||
			!slices.Equal(t.t.Shape[2:t.t.NDim], x.Shape[2:x.NDim]) || !t.t.Contiguous() {
			return h, a, invalid("%s: %s is %v: it must be dense [%d, %d, ...], x and halo alike in type and in what follows", op, t.name, *t.t, b.own.Batch(), t.rows)
		}
	}
	width := int64(1)
	for _, d := range x.Shape[2:x.NDim] {
		width *= d
	}
	c.must("the features of a row of x", width)
	*x, *rows = x.View(b.own.Batch(), b.own.Rows(), width), rows.View(b.own.Batch(), max(a.n, -a.n), width)
	return h, a, nil
}

func haloName(forward bool) string {
	if forward {
		return "ulysses_halo_forward"
	}
	return "ulysses_halo_backward"
}

// haloCall exchanges: forward sends rows and receives halos, backward the other way round.
func haloCall(op string, ch, bh uintptr, args unsafe.Pointer, forward bool) error {
	c, err := togetherOn(op, ch)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return c.exchangeHalo(op, bh, args, forward) })
}

func (c *context) exchangeHalo(op string, bh uintptr, args unsafe.Pointer, forward bool) error {
	h, a, err := c.readHalo(op, bh, args, forward, true)
	if err != nil {
		return err
	}
	r, wire := tensors{c: h.c, op: op}, &h.rows.Workspace
	if r.workspace(wire, a.workspace, uint64(a.workspace_bytes), h.bytes()); r.err != nil {
		return r.err
	}
	if err := h.c.overlaps(op); err != nil {
		return err
	}
	if err := sizeOf(op, "workspace", *wire, h.bytes()); err != nil {
		return err
	}
	if wire.IsNil() {
		*wire = h.c.bytes(nil, 0)
	}
	if err := h.c.join(op, a.stream); err != nil {
		return err
	}
	if forward {
		return h.c.part(h.rows.Forward(h.c.dev, h.c.comm, h.c.stream, h.b))
	}
	return h.c.part(h.rows.Backward(h.c.dev, h.c.comm, h.c.stream, h.b))
}

// bytes is the workspace of a call.
func (h *halo) bytes() int64 {
	send, recv := h.b.HaloElements(h.b.Rank(), h.rows.N, h.rows.X.Shape[2])
	return (send + recv) * h.rows.X.DType.Size()
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
	n := h.bytes()
	*(*uint64)(out) = uint64(n)
	return h.c.asked(n)
}

// lossReduce adds up the group's losses and counts.
func lossReduce(ch uintptr, sum, count, mean unsafe.Pointer) error {
	const op = "ulysses_loss_reduce"
	c, err := togetherOn(op, ch)
	if c == nil {
		return err
	}
	defer c.leave()
	return c.agreed(err, func() error { return c.reduceLoss(op, sum, count, mean) })
}

func (c *context) reduceLoss(op string, sum, count, mean unsafe.Pointer) error {
	if sum == nil || count == nil {
		return invalid("%s: sum or count is NULL", op)
	}
	n := *(*int64)(count)
	if n < 0 || n > 1<<52 {
		return invalid("%s: count is %d: 0 or more, below 2^52", op, n)
	}
	c.loss[0], c.loss[1] = *(*float64)(sum), float64(n)
	if err := c.agree(nil); err != nil {
		return err
	}
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
