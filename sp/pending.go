package sp

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Pending is a reshard under way. The zero value is ready; one that has been waited for can serve
// again, without allocating.
type Pending struct {
	plan       *Plan
	stream     device.Stream
	wire       tensor.Tensor
	parts      []part
	send, recv []int64
	sent       int64
	toHeads    bool
	request    comm.Request
}

// StartSeqToHeads packs and sends; Wait receives and unpacks. Until then the tensors and the
// workspace of r are in use: the rows that stay on this rank are copied by either half. Collective,
// and so is the order of waiting.
func (p *Plan) StartSeqToHeads(s device.Stream, b *Batch, r *Reshard, x *Pending) error {
	return p.start(s, b, r, x, "sp.StartSeqToHeads", true)
}

// StartHeadsToSeq is the way back.
func (p *Plan) StartHeadsToSeq(s device.Stream, b *Batch, r *Reshard, x *Pending) error {
	return p.start(s, b, r, x, "sp.StartHeadsToSeq", false)
}

func (p *Plan) start(s device.Stream, b *Batch, r *Reshard, x *Pending, op string, toHeads bool) error {
	parts, err := p.reshardParts(op, b, r, !toHeads)
	if x.plan != nil {
		err = status.Errorf(status.InvalidArgument, "%s: the request is under way: wait for it first", op)
	}
	if err = p.Admit.Result(err); err != nil {
		return err
	}
	x.stream, x.wire, x.toHeads = s, bytesOf(r.Workspace), toHeads
	x.parts = append(x.parts[:0], parts...)
	if len(parts) == 0 {
		x.plan = p
		return nil
	}
	sent, received := p.count(parts, toHeads)
	x.sent = sent
	if err := p.pack(s, x.wire, x.parts, toHeads); err != nil {
		return err
	}
	if p.size > 1 {
		x.send, x.recv = append(x.send[:0], p.send...), append(x.recv[:0], p.recv...)
		src, dst := onWire(x.wire, parts[0].seq.DType, sent, received)
		if x.request, err = p.comm.AllToAllStart(s, dst, src, x.recv, x.send); err != nil {
			return err
		}
	}
	x.plan = p
	return nil
}

// Wait finishes the reshard. It is called once for each start.
func (x *Pending) Wait() error {
	p := x.plan
	if p == nil {
		return status.Errorf(status.InvalidArgument, "sp.Pending.Wait: nothing is under way")
	}
	x.plan = nil
	if x.request != nil {
		err := x.request.Wait()
		if x.request = nil; err != nil {
			return err
		}
	}
	if len(x.parts) == 0 {
		return nil
	}
	return p.unpack(x.stream, x.wire, x.sent, x.parts, x.toHeads)
}
