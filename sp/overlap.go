package sp

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Overlap is a Forward or a Backward in its overlapped form: each tensor is sent in an all-to-all
// of its own while the caller computes the next one. The steps after the start are in this order:
//
//	StartForward                    StartBackward: sends dout
//	project q, SendQ                gradients of the output projection's weights
//	project k, SendK                AttendBackward: attention, sends dv, dk and dq
//	project v, SendV                WaitDV, gradients of v's weights
//	AttendForward                   WaitDK, gradients of k's weights
//	                                WaitDQ, gradients of q's weights
//
// Results are bitwise equal to Forward and Backward, and as many bytes are sent. (VeOmni,
// arXiv:2508.02317, calls this asynchronous Ulysses.)
//
// The zero value is ready for use. After the last step it can be used again, without allocating.
// Other calls of the plan may come between the steps, with other memory. Args and Grads of the
// start, and their tensors, must stay until the last step.
type Overlap struct {
	plan    *Plan
	due     Step
	batch   *Batch
	args    *Args
	grads   *Grads // nil in a Forward
	x, d    local
	scratch tensor.Tensor
	sends   [4]Pending
	used    int64 // bytes of scratch that hold sends
}

// Step is a step of an overlapped pass.
type Step int

// The steps. SendQ, SendK and SendV start to send a tensor, which must not change before
// AttendForward. AttendForward completes a Forward. AttendBackward computes the gradients of this
// rank's heads, and starts to send them, the values first; DOut must not change before it. WaitDV,
// WaitDK and WaitDQ complete a gradient.
const (
	NoStep Step = iota // no pass is in progress
	SendQ
	SendK
	SendV
	AttendForward
	AttendBackward
	WaitDV
	WaitDK
	WaitDQ
)

// String returns the name of the step.
func (s Step) String() string {
	return [...]string{"the start of a pass", "SendQ", "SendK", "SendV", "AttendForward", "AttendBackward", "WaitDV",
		"WaitDK", "WaitDQ"}[s]
}

// next returns the step that is due after s.
func (s Step) next() Step {
	if s == AttendForward || s == WaitDQ {
		return NoStep
	}
	return s + 1
}

// The tensors on their way. In Backward, dout is in the place of q.
const (
	sendsQ = iota
	sendsK
	sendsV
	sendsDOut
)

// Due returns the next step.
func (o *Overlap) Due() Step { return o.due }

// StartForward checks the arguments of a Forward. Their tensors q, k and v need no values yet.
// Collective.
func (p *Plan) StartForward(b *Batch, a *Args, o *Overlap) error {
	if err := p.Admit.Result(o.checkFree(p.checkForward(b, a))); err != nil {
		return err
	}
	o.plan, o.batch, o.args, o.grads, o.used, o.due = p, b, a, nil, 0, SendQ
	o.x, o.scratch = p.forwardMemory(b, a)
	return nil
}

// StartBackward checks the arguments of a Backward and starts to send DOut. Collective.
func (p *Plan) StartBackward(s device.Stream, b *Batch, a *Args, g *Grads, o *Overlap) error {
	if err := p.Admit.Result(o.checkFree(p.checkBackward(b, a, g))); err != nil {
		return err
	}
	o.plan, o.batch, o.args, o.grads, o.used, o.due = p, b, a, g, 0, AttendBackward
	o.x, o.d, o.scratch = p.backwardMemory(b, a)
	return o.send(s, sendsDOut, p.doutTensor(b, g, &o.d), true)
}

// checkFree returns err, or an error if a pass is in progress.
func (o *Overlap) checkFree(err error) error {
	if err == nil && o.due != NoStep {
		err = status.Errorf(status.InvalidArgument,
			"sp.Overlap: a pass is in progress, %v is due; complete the pass, or call Cancel", o.due)
	}
	return err
}

// Do runs a step, which must be the one that is due. Otherwise it is an error, and the pass remains
// as it is. Collective.
func (o *Overlap) Do(s device.Stream, step Step) error {
	if step == NoStep || step != o.due {
		return status.Errorf(status.InvalidArgument, "sp.Overlap: %v is called out of order; %v is due", step, o.due)
	}
	o.due = step.next()
	switch step {
	case SendQ, SendK, SendV:
		i := int(step - SendQ)
		return o.send(s, i, o.plan.qkvTensors(o.batch, o.args, &o.x)[i], true)
	case AttendForward:
		return o.attendForward(s)
	case AttendBackward:
		return o.attendBackward(s)
	}
	return o.sends[WaitDQ-step].Wait()
}

// send packs a tensor and starts its all-to-all.
func (o *Overlap) send(s device.Stream, i int, t reshardTensor, toHeads bool) error {
	x := &o.sends[i]
	x.tensors = append(x.tensors[:0], t)
	n, err := x.begin(o.plan, s, o.scratch.Slice(0, o.used, o.scratch.Shape[0]), toHeads)
	o.used += n
	return err
}

func (o *Overlap) attendForward(s device.Stream) error {
	for i := sendsQ; i <= sendsV; i++ {
		if err := o.sends[i].Wait(); err != nil {
			return err
		}
	}
	return o.plan.attendAndReturn(s, o.batch, o.args, &o.x, o.scratch)
}

func (o *Overlap) attendBackward(s device.Stream) error {
	p := o.plan
	if err := o.sends[sendsDOut].Wait(); err != nil {
		return err
	}
	if err := p.backAttend(s, o.batch, o.args, o.grads, &o.x, &o.d, o.scratch); err != nil {
		return err
	}
	o.used = 0
	tensors := p.gradTensors(o.batch, o.args, o.grads, &o.d)
	for _, i := range [...]int{sendsV, sendsK, sendsQ} {
		if err := o.send(s, i, tensors[i], false); err != nil {
			return err
		}
	}
	return nil
}

// Cancel ends a pass before its last step. It waits for the tensors that are on their way, and does
// not unpack them: what the pass has to write is undefined. Collective.
func (o *Overlap) Cancel() (err error) {
	for i := range o.sends {
		if o.grads != nil { // in the order of the starts
			i = len(o.sends) - 1 - i
		}
		if failed := o.sends[i].Cancel(); err == nil {
			err = failed
		}
	}
	o.due = NoStep
	return err
}
