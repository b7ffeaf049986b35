package main

import (
	"unsafe"

	"ulysses/sp"
)

// maxPasses is the number of passes of a context that are in progress at the same time.
const maxPasses = 16

// pass is an overlapped pass of attention in progress, or a free slot for one. The context owns it.
type pass struct {
	ctx          *context
	plan         *plan
	handle       uintptr // 0 = free
	number       int64   // among the plans, batches and passes of the context, equal on all ranks
	callerStream uintptr
	memory       ownMemory
	overlap      sp.Overlap

	// What the fields of the context with these names were in the start.
	args    sp.Args
	grads   sp.Grads
	options optionTensors
	saved   savedMemory
}

// release makes a pass free.
func (x *pass) release() {
	if x.handle != 0 {
		unregister(x.handle)
		x.handle = 0
	}
}

func forwardStart(ph, bh uintptr, args, out unsafe.Pointer) error {
	const op = "ulysses_attention_forward_start"
	return onPlan(op, ph, bh, func(p *plan, both *batch) error {
		r := reader{c: p.ctx, op: op}
		if err := clearOut(op, out); err != nil {
			return err
		}
		b, a, err := p.forwardArgs(&r, both, args)
		if err != nil {
			return err
		}
		return p.startPass(&r, both, b, &a, false, out)
	})
}

func backwardStart(ph, bh uintptr, args, grads, out unsafe.Pointer) error {
	const op = "ulysses_attention_backward_start"
	return onPlan(op, ph, bh, func(p *plan, both *batch) error {
		r := reader{c: p.ctx, op: op}
		if err := clearOut(op, out); err != nil {
			return err
		}
		b, a, err := p.backwardArgs(&r, both, args, grads)
		if err != nil {
			return err
		}
		return p.startPass(&r, both, b, &a, true, out)
	})
}

// startPass starts a pass whose tensors were read into the context, and writes its handle to out.
// Collective.
func (p *plan) startPass(r *reader, both *batch, b *sp.Batch, a *cAttentionArgs, backward bool,
	out unsafe.Pointer) error {
	c := p.ctx
	x, err := c.freePass(r.op)
	if err != nil {
		return err
	}
	r.ownWorkspace(&c.args.Workspace, &x.memory, a.workspace, a.workspace_bytes, p.sizesOf(b).Workspace)
	if err := r.finish(attentionSaved, p, both, 0, backward); err != nil {
		return err
	}
	if err := c.beginOptions(r.op, p, b); err != nil {
		return err
	}
	x.plan, x.callerStream = p, a.stream
	x.args, x.grads, x.options, x.saved = c.args, c.grads, c.options, c.saved
	if x.handle, err = register(passKind, x); err != nil {
		return err
	}
	if err := x.start(r.op, b, backward); err != nil {
		x.release()
		x.overlap = sp.Overlap{}
		return err
	}
	c.agreement.created++
	x.number = c.agreement.created
	*(*uintptr)(out) = x.handle
	return nil
}

// freePass returns a free pass.
func (c *context) freePass(op string) (*pass, error) {
	for _, x := range c.passes {
		if x.handle == 0 {
			return x, nil
		}
	}
	if len(c.passes) == maxPasses {
		return nil, invalid("%s: %d passes are in progress, which is the maximum; complete or cancel one", op,
			maxPasses)
	}
	x := &pass{ctx: c}
	c.passes = append(c.passes, x)
	return x, nil
}

// start starts the pass with sp, which lets the ranks agree. Collective.
func (x *pass) start(op string, b *sp.Batch, backward bool) error {
	c := x.ctx
	if err := c.waitForCaller(op, x.callerStream); err != nil {
		return err
	}
	if err := c.widenOptions(); err != nil {
		return err
	}
	if backward {
		return x.plan.sp.StartBackward(c.stream, b, &x.args, &x.grads, &x.overlap)
	}
	return x.plan.sp.StartForward(b, &x.args, &x.overlap)
}

// onPass runs the body of a collective call on a pass, and lets the ranks agree. Collective.
func onPass(op string, h uintptr, body func(x *pass) error) error {
	x, err := find[pass](op, passKind, h)
	c := onlyContext()
	if err == nil {
		c = x.ctx
	}
	return c.collective(op, err, func() error {
		c.requireEqual("the number of the pass", x.number)
		return body(x)
	})
}

// The calls of the steps, for messages, and the steps of the tensors.
var (
	passCalls = map[sp.Step]string{sp.SendQ: "ulysses_pass_send(ULYSSES_TENSOR_Q)",
		sp.SendK: "ulysses_pass_send(ULYSSES_TENSOR_K)", sp.SendV: "ulysses_pass_send(ULYSSES_TENSOR_V)",
		sp.AttendForward: "ulysses_pass_attend", sp.AttendBackward: "ulysses_pass_attend",
		sp.WaitDV: "ulysses_pass_wait(ULYSSES_TENSOR_V)", sp.WaitDK: "ulysses_pass_wait(ULYSSES_TENSOR_K)",
		sp.WaitDQ: "ulysses_pass_wait(ULYSSES_TENSOR_Q)"}
	sendSteps = map[int32]sp.Step{tensorQ: sp.SendQ, tensorK: sp.SendK, tensorV: sp.SendV}
	waitSteps = map[int32]sp.Step{tensorQ: sp.WaitDQ, tensorK: sp.WaitDK, tensorV: sp.WaitDV}
)

func passSend(h uintptr, tensor int32) error {
	const op = "ulysses_pass_send"
	return onPass(op, h, func(x *pass) error { return x.tensorStep(op, sendSteps, tensor) })
}

func passWait(h uintptr, tensor int32) error {
	const op = "ulysses_pass_wait"
	return onPass(op, h, func(x *pass) error { return x.tensorStep(op, waitSteps, tensor) })
}

func passAttend(h uintptr) error {
	const op = "ulysses_pass_attend"
	return onPass(op, h, func(x *pass) error {
		if x.overlap.Due() == sp.AttendBackward {
			return x.step(op, sp.AttendBackward)
		}
		return x.step(op, sp.AttendForward)
	})
}

// tensorStep runs the step of a tensor. Collective.
func (x *pass) tensorStep(op string, steps map[int32]sp.Step, tensor int32) error {
	step, ok := steps[tensor]
	if !ok {
		return invalid("%s: the tensor is %d; use ULYSSES_TENSOR_Q, K or V", op, tensor)
	}
	return x.step(op, step)
}

// step runs a step, which must be the one that is due. Collective.
func (x *pass) step(op string, step sp.Step) (err error) {
	c := x.ctx
	if due := x.overlap.Due(); step != due {
		return invalid("%s: %s is called out of order; %s is due", op, passCalls[step], passCalls[due])
	}
	if err := c.agree(nil); err != nil {
		return err
	}
	switch step {
	case sp.SendQ, sp.SendK, sp.SendV:
		return x.send(op, step)
	case sp.AttendBackward:
		return x.attendBackward()
	}
	err = x.finish(x.overlap.Do(c.stream, step))
	if step == sp.AttendForward {
		c.saved = x.saved
		return c.writeTag(err)
	}
	return err
}

// send sends a tensor. The caller's stream does not wait for it.
func (x *pass) send(op string, step sp.Step) error {
	if err := x.ctx.waitForCaller(op, x.callerStream); err != nil {
		return err
	}
	return x.overlap.Do(x.ctx.stream, step)
}

// attendBackward computes the gradients. The caller's stream waits for each of them later.
func (x *pass) attendBackward() error {
	c := x.ctx
	if err := x.overlap.Do(c.stream, sp.AttendBackward); err != nil {
		return err
	}
	c.options = x.options
	return c.endOptions()
}

// finish lets the caller's stream wait for a step that writes outputs, and ends the pass if the
// step was the last one. It returns err.
func (x *pass) finish(err error) error {
	if x.overlap.Due() == sp.NoStep {
		x.release()
	}
	if x.ctx.gpu != nil {
		x.ctx.gpu.callerStream = x.callerStream
	}
	return x.ctx.callerWaits(err)
}

func passCancel(h uintptr) error {
	return onPass("ulysses_pass_cancel", h, func(x *pass) error {
		if err := x.ctx.agree(nil); err != nil {
			return err
		}
		return x.finish(x.overlap.Cancel())
	})
}
