// Package gdn runs the gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464) on ranks
// that hold shards of the tokens. A Plan uses one of two strategies:
//
//   - Heads: as in package sp, one all-to-all gives each rank all tokens of a shard of the heads,
//     and a second one restores token sharding. Results are bitwise equal to the results of one
//     rank. The number of bytes sent is proportional to the number of tokens.
//   - State: tokens stay on their ranks. Each rank describes the document that continues on the
//     next rank by a recurrent state and a transition matrix. One all-to-all brings these to the
//     ranks that follow, and each rank starts from the state before its first token. The number of
//     bytes sent does not depend on the number of tokens.
//
// Both strategies are exact for packed documents with any boundaries, and for any numbers of heads,
// tokens and ranks. Forward and Backward run the rule alone (the core). LayerForward and
// LayerBackward also run the causal convolution, its SiLU, the gates and, if the layer has it, the
// gated norm of Qwen3-Next and Qwen3.5.
//
// NewPlan is called once for a kind of layer, sp.NewBatch once for the lengths and documents of a
// batch. Calls run in memory of the caller and allocate nothing.
package gdn

import (
	"fmt"
	"math"
	"strconv"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// Plan is a kind of layer on the ranks of a communicator. It serves all layers of that kind and all
// batches, one call at a time.
type Plan struct {
	Admit sp.Admit

	base
	method   method
	describe string         // what String returns
	channels []channelRange // of this rank's heads

	// The call in progress and the arguments of the device's operations, kept here so that calls
	// allocate nothing on the heap.
	call      call
	layout    layout // of the last batch
	delta     device.GatedDelta
	deltaGrad device.GatedDeltaGrad
	conv      device.Conv1dGrad
	gates     device.DeltaGates
	gatesGrad device.DeltaGatesGrad
	norm      device.GatedRMSNorm
	normGrad  device.GatedRMSNormGrad
}

// NewPlan returns a plan of a layer for the ranks of c. Collective. If the layer is invalid or
// differs between ranks, all ranks return the error InvalidArgument; if the device does not compute
// in the layer's type or head sizes, Unsupported.
func NewPlan(d device.Device, c comm.Comm, l Layer) (*Plan, error) {
	info := d.Info()
	if l.DType == tensor.Invalid {
		l.DType = tensor.F32
	}
	fields := append(l.fields(),
		comm.Field{Name: "device", Value: info.Kind},
		comm.Field{Name: "tokens before heads", Value: strconv.FormatBool(info.TokenMajor)},
		comm.Field{Name: "kernels", Value: info.KernelsIn(l.DType)})
	if err := comm.Same(c, "gdn.NewPlan", fields...); err != nil {
		return nil, err
	}
	// The layer is the same on all ranks, so all return the same error here.
	if err := l.check(info); err != nil {
		return nil, err
	}
	if l.Scale == 0 {
		l.Scale = 1 / math.Sqrt(float64(l.KeyDim))
	}
	p := &Plan{base: base{dev: d, comm: c, layer: l, rank: int64(c.Rank()), size: int64(c.Size()),
		align: max(1, info.Align), tokenMajor: info.TokenMajor}}
	return p, p.choose()
}

// choose resolves the strategy by the bytes that all ranks send for a document over all of them.
// Collective.
func (p *Plan) choose() error {
	l := &p.layer
	tokens := l.Tokens
	if tokens == 0 {
		tokens = p.size // one for each rank: with State, the bytes do not depend on the number
	}
	b, err := sp.SketchBatch(int(p.rank), int(p.size), sp.BatchSpec{Batch: 1, Seq: tokens})
	if err != nil {
		return err
	}
	x := layout{batch: b}
	x.shards.fill(b)
	byHeads, byState := newHeadsMethod(&p.base), newStateMethod(&p.base, &x.shards)
	total := func(m method) (sum int64) {
		for rank := range p.size {
			for _, backward := range []bool{false, true} {
				sum += m.bytesSent(&x, rank, callKind{layer: l.ConvWidth > 0, backward: backward})
			}
		}
		return sum
	}
	heads, state := total(byHeads), total(byState)
	requested := l.Strategy
	if requested == Auto {
		l.Strategy = Heads
		if l.Tokens > 0 && state < heads {
			l.Strategy = State
		}
	}
	if l.Strategy == Heads {
		p.method, err = byHeads, byHeads.open()
	} else {
		p.method = byState
	}
	p.describe = p.describeChoice(requested, heads, state)
	p.channels = l.channelRanges(p.method.heads(p.rank))
	return err
}

// describeChoice returns the plan in one line: the strategy, why it was chosen, and the bytes that
// all ranks send by either strategy in a forward and a backward pass.
func (p *Plan) describeChoice(requested Strategy, heads, state int64) string {
	l, sent := &p.layer, heads
	if l.Strategy == State {
		sent = state
	}
	details, traffic := p.method.describe(sent)
	s := fmt.Sprintf("gated delta rule over %d ranks by %v%s", p.size, l.Strategy, details)
	switch {
	case p.size == 1:
		return s + ", sends nothing"
	case l.Tokens == 0:
		s += fmt.Sprintf(", all ranks together send %s, forward and backward", traffic)
	default:
		s += fmt.Sprintf(
			", all ranks together send for a document of %d tokens, forward and backward, without its first and last state, "+
				"%d bytes by heads and %d by state", l.Tokens, heads, state)
	}
	switch {
	case requested != Auto:
		return s + "; strategy as requested"
	case l.Tokens == 0:
		return s + "; strategy auto: heads, because the number of tokens of a batch is unknown"
	}
	return s + "; strategy auto: the smaller number"
}

// Layer returns the layer that the plan was made for, with type, scale and strategy resolved.
func (p *Plan) Layer() Layer { return p.layer }

// Strategy returns Heads or State.
func (p *Plan) Strategy() Strategy { return p.layer.Strategy }

// Heads returns the value heads [lo, hi) that this rank computes and the key heads [keyLo, keyHi)
// that they use: all heads with State.
func (p *Plan) Heads() (lo, hi, keyLo, keyHi int64) {
	h := p.method.heads(p.rank)
	return h.lo, h.hi, h.keyLo, h.keyHi
}

// String returns the strategy, why it was chosen, and the bytes that all ranks send, in one line.
func (p *Plan) String() string { return p.describe }

// layoutOf returns the layout of a batch. The layout of the last batch is cached.
func (p *Plan) layoutOf(b *sp.Batch) *layout {
	if p.layout.batch != b {
		p.fillLayout(&p.layout, b)
	}
	return &p.layout
}

func (p *Plan) fillLayout(l *layout, b *sp.Batch) {
	l.reset(b)
	p.method.divide(l)
}
