package main

import (
	"slices"
	"unsafe"

	"ulysses/comm"
	"ulysses/sp"
	"ulysses/tensor"
)

// halo is the current halo call. The context owns it.
type halo struct {
	c    *context
	b    *sp.Batch
	rows sp.Halo
}

// readHalo checks the arguments of a halo. The result's x and halo are [B, rows, width] and
// [B, |n|, width]. With data false it reads shapes only.
func (c *context) readHalo(op string, bh uintptr, args unsafe.Pointer, forward, data bool) (h *halo, a cHaloArgs,
	err error) {
	h = &c.halo
	h.c, h.rows.Admit = c, c.admit
	b, err := find[batch](op, batchKind, bh)
	if err != nil {
		return h, a, err
	}
	if b.ctx != c {
		return h, a, invalid("%s: the batch was created on another context; give a batch of this context", op)
	}
	if b.flatBatch == nil {
		return h, a, unsupported(
			"%s: the batch has ULYSSES_ZIGZAG, and a halo needs consecutive rows of each rank; make the batch without the flag",
			op)
	}
	h.b = b.flatBatch
	c.requireEqual("the number of the batch", b.number)
	x, rows := &h.rows.X, &h.rows.Rows
	*x, *rows, h.rows.Workspace = tensor.Tensor{}, tensor.Tensor{}, tensor.Tensor{}
	if a, err = readStruct[cHaloArgs](op, "args", args); err != nil {
		return h, a, err
	}
	h.rows.N = a.n
	c.requireEqual("n", a.n)
	if a.n == 0 || a.n < -maxTokens || a.n > maxTokens || a.reserved != 0 {
		return h, a, invalid(
			"%s: n is %d and args.reserved %d; give n > 0 for the rows before, n < 0 for the rows after, and reserved 0",
			op, a.n, a.reserved)
	}
	c.shapesOnly = !data
	defer func() { c.shapesOnly = false }()
	r := reader{c: c, op: op}
	r.get(x, "x", a.x, 0, !forward)
	r.get(rows, "halo", a.halo, 0, forward)
	if r.err != nil {
		return h, a, r.err
	}
	if !slices.Contains(c.dev.Info().Compute, x.DType) {
		return h, a, unsupported("%s: x is %v; a halo on this device must be of one of %v", op, *x,
			c.dev.Info().Compute)
	}
	return h, a, h.flatten(op)
}

// flatten checks the shapes of x and halo, and combines the axes after the second into one.
func (h *halo) flatten(op string) error {
	x, n := &h.rows.X, max(h.rows.N, -h.rows.N)
	for _, t := range [...]struct {
		name string
		t    *tensor.Tensor
		rows int64
	}{{"x", x, h.b.Rows()}, {"halo", &h.rows.Rows, n}} {
		if t.t.NDim < 2 || t.t.NDim != x.NDim || t.t.DType != x.DType || t.t.Shape[0] != h.b.Batch() ||
			t.t.Shape[1] != t.rows ||
			!slices.Equal(t.t.Shape[2:t.t.NDim], x.Shape[2:x.NDim]) || !t.t.Contiguous() {
			return invalid(
				"%s: %s is %v; it must be row-major [%d, %d, ...], and x and halo must have the same type and the same further axes",
				op, t.name, *t.t, h.b.Batch(), t.rows)
		}
	}
	width := int64(1)
	for _, d := range x.Shape[2:x.NDim] {
		width *= d
	}
	h.c.requireEqual("the features of a row of x", width)
	h.c.requireEqual("the type of x (1 = BF16, 0 = F32)", int64(b2i(x.DType == tensor.BF16)))
	h.rows.X, h.rows.Rows = x.View(h.b.Batch(), h.b.Rows(), width), h.rows.Rows.View(h.b.Batch(), n, width)
	return nil
}

func haloName(forward bool) string {
	if forward {
		return "ulysses_halo_forward"
	}
	return "ulysses_halo_backward"
}

// callHalo sends rows and receives halos. The backward pass (forward false) sends gradients of
// halos and adds those that it receives to the gradients of rows. Collective.
func callHalo(op string, ch, bh uintptr, args unsafe.Pointer, forward bool) error {
	return onContext(op, ch, func(c *context) error { return c.runHalo(op, bh, args, forward) })
}

func (c *context) runHalo(op string, bh uintptr, args unsafe.Pointer, forward bool) error {
	h, a, err := c.readHalo(op, bh, args, forward, true)
	if err != nil {
		return err
	}
	r, workspace, need := reader{c: c, op: op}, &h.rows.Workspace, h.bytes()
	if r.workspace(workspace, a.workspace, a.workspace_bytes, need); r.err != nil {
		return r.err
	}
	if err := c.checkOverlaps(op); err != nil {
		return err
	}
	if err := checkSize(op, "workspace", *workspace, need); err != nil {
		return err
	}
	if workspace.IsNil() {
		*workspace = c.byteTensor(nil, 0)
	}
	return c.enqueue(op, a.stream, func() error {
		if forward {
			return h.rows.Forward(c.dev, c.comm, c.stream, h.b)
		}
		return h.rows.Backward(c.dev, c.comm, c.stream, h.b)
	})
}

// bytes returns the workspace of a call in bytes.
func (h *halo) bytes() int64 {
	send, recv := h.b.HaloElements(h.b.Rank(), h.rows.N, h.rows.X.Shape[2])
	return (send + recv) * h.rows.X.DType.Size()
}

func haloWorkspace(ch, bh uintptr, args, out unsafe.Pointer) error {
	const op = "ulysses_halo_workspace"
	return inContext(op, ch, func(c *context) error {
		h, _, err := c.readHalo(op, bh, args, true, false)
		if err != nil {
			return err
		}
		return c.writeWorkspace(op, h.bytes(), out)
	})
}

// writeWorkspace writes the result of a query for workspace.
func (c *context) writeWorkspace(op string, bytes int64, out unsafe.Pointer) error {
	if out == nil {
		return invalid("%s: bytes is NULL; give the address of a uint64_t", op)
	}
	*(*uint64)(out) = uint64(bytes)
	return c.reserveQueried(bytes)
}

// lossReduce adds the sums and the counts of the group's ranks. Collective.
func lossReduce(ch uintptr, sum, count, mean unsafe.Pointer) error {
	const op = "ulysses_loss_reduce"
	return onContext(op, ch, func(c *context) error { return c.reduceLoss(op, sum, count, mean) })
}

func (c *context) reduceLoss(op string, sum, count, mean unsafe.Pointer) error {
	if sum == nil || count == nil {
		return invalid("%s: sum or count is NULL; give the address of both", op)
	}
	n := *(*int64)(count)
	if n < 0 || n > 1<<52 {
		return invalid("%s: count is %d; give 0 to 2^52", op, n)
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
