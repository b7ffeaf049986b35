package sp

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The overlapped form of Forward and Backward sends each tensor in an all-to-all of its own, while
// the caller computes the next one:
//
//	StartForward                    StartBackward: sends dout
//	project q, SendQ                gradients of the output projection's weights
//	project k, SendK                MidBackward: attention, sends dv, dk and dq
//	project v, SendV                WaitDV, gradients of v's weights
//	FinishForward                   WaitDK, gradients of k's weights
//	                                WaitDQ, gradients of q's weights
//
// Results are bitwise equal to Forward and Backward, and as many bytes are sent. (VeOmni,
// arXiv:2508.02317, calls this asynchronous Ulysses.)

// overlap is a call in its overlapped form.
type overlap struct {
	state   overlapState
	batch   *Batch
	args    *Args
	grads   *Grads
	x, d    local
	scratch tensor.Tensor
	sends   [4]sending
	used    int64 // bytes of scratch that hold sends
}

// overlapState is what has been called last.
type overlapState int

const (
	idle overlapState = iota
	startedForward
	sentQ
	sentK
	sentV
	startedBackward
	returnedAll
	waitedDV
	waitedDK
)

// sending is one tensor on its way.
type sending struct {
	tensors    [1]reshardTensor
	wire       tensor.Tensor
	send, recv []int64
	sent       int64
	toHeads    bool
	request    comm.Request
}

// The tensors on their way. In Backward, dout is in the place of q.
const (
	sendsQ = iota
	sendsK
	sendsV
	sendsDOut
)

// step checks the order of the calls.
func (p *Plan) step(op string, before, after overlapState) error {
	if p.over.state != before {
		p.over.state = idle
		return status.Errorf(status.InvalidArgument,
			"%s: it is called out of order; call the functions of an overlapped pass one after the other, as sp/overlap.go lists them", op)
	}
	p.over.state = after
	return nil
}

// startOne packs a tensor and starts its all-to-all.
func (p *Plan) startOne(s device.Stream, x *sending, t reshardTensor, toHeads bool) (err error) {
	o := &p.over
	x.tensors[0], x.toHeads = t, toHeads
	sent, received := p.count(x.tensors[:], toHeads)
	bytes := (sent + received) * t.seq.DType.Size()
	x.sent, x.wire = sent, o.scratch.Slice(0, o.used, o.used+bytes)
	o.used += bytes
	if err := p.pack(s, x.wire, x.tensors[:], toHeads); err != nil || p.size == 1 {
		return err
	}
	x.send, x.recv = append(x.send[:0], p.send...), append(x.recv[:0], p.recv...)
	src, dst := onWire(x.wire, t.seq.DType, sent, received)
	x.request, err = p.comm.AllToAllStart(s, dst, src, x.recv, x.send)
	return err
}

// finishOne waits for a tensor and unpacks it.
func (p *Plan) finishOne(s device.Stream, x *sending) error {
	if x.request != nil {
		err := x.request.Wait()
		if x.request = nil; err != nil {
			return err
		}
	}
	return p.unpack(s, x.wire, x.sent, x.tensors[:], x.toHeads)
}

// StartForward checks the arguments of a Forward. Their tensors q, k and v need no values yet.
// Collective.
func (p *Plan) StartForward(s device.Stream, b *Batch, a *Args) error {
	if err := p.Admit.Result(p.checkForward(b, a)); err != nil {
		return err
	}
	o := &p.over
	o.state, o.batch, o.args, o.used = startedForward, b, a, 0
	o.x, o.scratch = p.forwardMemory(b, a)
	return nil
}

// SendQ, SendK and SendV start to send a tensor, in this order. It must not change before
// FinishForward. Collective.
func (p *Plan) SendQ(s device.Stream) error { return p.sendOne(s, "sp.SendQ", sendsQ, startedForward) }
func (p *Plan) SendK(s device.Stream) error { return p.sendOne(s, "sp.SendK", sendsK, sentQ) }
func (p *Plan) SendV(s device.Stream) error { return p.sendOne(s, "sp.SendV", sendsV, sentK) }

func (p *Plan) sendOne(s device.Stream, op string, i int, before overlapState) error {
	if err := p.step(op, before, before+1); err != nil {
		return err
	}
	o := &p.over
	return p.startOne(s, &o.sends[i], p.qkvTensors(o.batch, o.args, &o.x)[i], true)
}

// FinishForward completes a Forward. Collective.
func (p *Plan) FinishForward(s device.Stream) error {
	if err := p.step("sp.FinishForward", sentV, idle); err != nil {
		return err
	}
	o := &p.over
	for i := sendsQ; i <= sendsV; i++ {
		if err := p.finishOne(s, &o.sends[i]); err != nil {
			return err
		}
	}
	return p.attendAndReturn(s, o.batch, o.args, &o.x, o.scratch)
}

// StartBackward starts to send DOut of a Backward. It must not change before MidBackward.
// Collective.
func (p *Plan) StartBackward(s device.Stream, b *Batch, a *Args, g *Grads) error {
	if err := p.Admit.Result(p.checkBackward(b, a, g)); err != nil {
		return err
	}
	o := &p.over
	o.state, o.batch, o.args, o.grads, o.used = startedBackward, b, a, g, 0
	o.x, o.d, o.scratch = p.backwardMemory(b, a)
	return p.startOne(s, &o.sends[sendsDOut], p.doutTensor(b, g, &o.d), true)
}

// MidBackward computes the gradients of this rank's heads, and starts to send them, the values
// first. Collective.
func (p *Plan) MidBackward(s device.Stream) error {
	if err := p.step("sp.MidBackward", startedBackward, returnedAll); err != nil {
		return err
	}
	o := &p.over
	if err := p.finishOne(s, &o.sends[sendsDOut]); err != nil {
		return err
	}
	if err := p.backAttend(s, o.batch, o.args, o.grads, &o.x, &o.d, o.scratch); err != nil {
		return err
	}
	o.used = 0
	tensors := p.gradTensors(o.batch, o.args, o.grads, &o.d)
	for _, i := range [...]int{sendsV, sendsK, sendsQ} {
		if err := p.startOne(s, &o.sends[i], tensors[i], false); err != nil {
			return err
		}
	}
	return nil
}

// WaitDV, WaitDK and WaitDQ complete a gradient, in this order.
func (p *Plan) WaitDV(s device.Stream) error {
	return p.waitOne(s, "sp.WaitDV", sendsV, returnedAll, waitedDV)
}
func (p *Plan) WaitDK(s device.Stream) error {
	return p.waitOne(s, "sp.WaitDK", sendsK, waitedDV, waitedDK)
}
func (p *Plan) WaitDQ(s device.Stream) error {
	return p.waitOne(s, "sp.WaitDQ", sendsQ, waitedDK, idle)
}

func (p *Plan) waitOne(s device.Stream, op string, i int, before, after overlapState) error {
	if err := p.step(op, before, after); err != nil {
		return err
	}
	return p.finishOne(s, &p.over.sends[i])
}
