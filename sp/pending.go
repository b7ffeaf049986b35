package sp

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Pending is a reshard in progress. The zero value is ready for use. After Wait it can be used
// again, without allocating.
type Pending struct {
	plan       *Plan
	stream     device.Stream
	wire       tensor.Tensor
	tensors    []reshardTensor
	send, recv []int64
	sent       int64
	toHeads    bool
	request    comm.Request
}

// StartSeqToHeads packs and sends; Wait receives and unpacks. Between the two, the tensors and the
// workspace of r must not be changed, because both copy rows that stay on this rank. Collective
// over the plan's communicator. All ranks wait in the same order.
func (p *Plan) StartSeqToHeads(s device.Stream, b *Batch, r *Reshard, x *Pending) error {
	return p.start(s, b, r, x, "sp.StartSeqToHeads", true)
}

// StartHeadsToSeq is StartSeqToHeads for HeadsToSeq.
func (p *Plan) StartHeadsToSeq(s device.Stream, b *Batch, r *Reshard, x *Pending) error {
	return p.start(s, b, r, x, "sp.StartHeadsToSeq", false)
}

func (p *Plan) start(s device.Stream, b *Batch, r *Reshard, x *Pending, op string, toHeads bool) error {
	tensors, err := p.checkReshard(op, b, r, !toHeads)
	if x.plan != nil {
		err = status.Errorf(status.InvalidArgument,
			"%s: the last reshard of this Pending is in progress; call Wait first", op)
	}
	if err = p.Admit.Result(err); err != nil {
		return err
	}
	x.tensors = append(x.tensors[:0], tensors...)
	if len(tensors) == 0 {
		x.plan = p
		return nil
	}
	_, err = x.begin(p, s, bytesOf(r.Workspace), toHeads)
	return err
}

// begin packs and sends x.tensors, and returns the bytes of the wire that it uses.
func (x *Pending) begin(p *Plan, s device.Stream, wire tensor.Tensor, toHeads bool) (int64, error) {
	x.stream, x.wire, x.toHeads = s, wire, toHeads
	sent, received := p.count(x.tensors, toHeads)
	if err := p.pack(s, wire, x.tensors, toHeads); err != nil {
		return 0, err
	}
	dtype := x.tensors[0].seq.DType
	if x.sent = sent; p.size > 1 {
		x.send, x.recv = append(x.send[:0], p.send...), append(x.recv[:0], p.recv...)
		src, dst := onWire(wire, dtype, sent, received)
		var err error
		if x.request, err = p.comm.AllToAllStart(s, dst, src, x.recv, x.send); err != nil {
			return 0, err
		}
	}
	x.plan = p
	return (sent + received) * dtype.Size(), nil
}

// Wait completes the reshard. It is called once for each start.
func (x *Pending) Wait() error {
	p := x.plan
	if p == nil {
		return status.Errorf(status.InvalidArgument, "sp.Pending.Wait: no reshard is in progress; start one first")
	}
	if err := x.Cancel(); err != nil || len(x.tensors) == 0 {
		return err
	}
	return p.unpack(x.stream, x.wire, x.sent, x.tensors, x.toHeads)
}

// Cancel completes the all-to-all without unpacking, and ends the reshard if one is in progress.
// Collective.
func (x *Pending) Cancel() (err error) {
	if x.plan = nil; x.request != nil {
		err = x.request.Wait()
		x.request = nil
	}
	return err
}
