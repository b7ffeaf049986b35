package model

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/sp"
	"ulysses/tensor"
)

// plans are the plans that layers of a kind share, and how many share them. A kind that no layer
// has has none.
type plans struct {
	full           *sp.Plan // of one group of heads
	groups         int64    // of heads
	grouped        map[int64]*sp.Plan
	linear         *gdn.Plan
	fulls, linears int64
	comm           comm.Comm

	most   sizes // over mostOf tokens
	mostOf int64
}

// sizes is the memory that a call of a plan needs.
type sizes struct {
	full   struct{ saved, lse, workspace int64 } // of one group of heads, padded
	linear gdn.Sizes
}

func (p *plans) make(d device.Device, c comm.Comm, cfg *Config, o Options) (err error) {
	p.linears = cfg.LinearLayers()
	p.fulls = cfg.NumHiddenLayers - p.linears
	p.grouped, p.comm = map[int64]*sp.Plan{}, c
	err = p.group(d, c, cfg, o.Compute, 1)
	if err == nil && p.linears > 0 {
		p.linear, err = gdn.NewPlan(d, c, gdn.Layer{KeyHeads: cfg.LinearNumKeyHeads, ValueHeads: cfg.LinearNumValueHeads,
			KeyDim: cfg.LinearKeyHeadDim, ValueDim: cfg.LinearValueHeadDim, DType: o.Compute, L2Norm: true, Strategy: o.Strategy, Tokens: o.Tokens,
			ConvWidth: cfg.LinearConvKernelDim})
	}
	return err
}

// group takes the plan of softmax attention for heads in so many groups; a new one is collective.
func (p *plans) group(d device.Device, c comm.Comm, cfg *Config, compute tensor.DType, groups int64) (err error) {
	plan := p.grouped[groups]
	if p.fulls > 0 && plan == nil {
		plan, err = sp.NewPlan(d, c, sp.Layer{Heads: cfg.NumAttentionHeads / groups, KVHeads: cfg.NumKeyValueHeads / groups, Dim: cfg.HeadDim,
			VDim: cfg.HeadDim, DType: compute, Causal: true})
		if err != nil {
			return err
		}
		p.grouped[groups] = plan
	}
	p.full, p.groups, p.mostOf = plan, groups, 0
	return nil
}

// sizes is what mixing this many tokens needs, whatever the documents, so that what a pass takes is
// what was planned.
func (p *plans) sizes(d device.Device, tokens int64) (s sizes, err error) {
	if p.mostOf != tokens {
		if s, err = p.maxSizes(d, tokens); err != nil {
			return s, err
		}
		p.most, p.mostOf = s, tokens
	}
	return p.most, nil
}

func (p *plans) maxSizes(d device.Device, tokens int64) (s sizes, err error) {
	if p.full != nil {
		var whole sp.Sizes
		if whole, err = p.full.MaxSizes(1, tokens, tokens); err == nil {
			f := &s.full
			f.workspace = whole.Workspace
			f.saved, f.lse, err = p.full.MaxApart(1, tokens, tokens)
			f.saved, f.lse = device.Padded(d, f.saved), device.Padded(d, f.lse)
		}
	}
	if err == nil && p.linear != nil {
		s.linear, err = p.linear.MaxLayerSizes(1, tokens)
	}
	return s, err
}

// Reserve has the communicator make, before the first pass, what it needs beside tensors for
// batches of at most so many tokens.
func (m *Model) Reserve(tokens int64) (err error) {
	if m.plans.full != nil {
		err = m.plans.full.Reserve(1, tokens, tokens)
	}
	if err == nil && m.plans.linear != nil {
		err = m.plans.linear.Reserve(1, tokens)
	}
	return err
}

// BytesSent is what the formulas say that this rank's mixers send to others in one Forward, and on
// top of it in the backward half of one ForwardBackward, with what is computed again there.
func (m *Model) BytesSent(b *sp.Batch) (forward, backward int64) {
	if m.isAlone(b) {
		return 0, 0
	}
	again, restored := m.recomputed()
	if p := &m.plans; p.full != nil {
		f, back := p.full.BytesSent(b)
		forward = p.fulls * p.groups * f
		backward = p.groups * (p.fulls*back + again.fulls*f + restored*p.full.RestoreBytesSent(b))
	}
	if p := &m.plans; p.linear != nil {
		f, back := p.linear.LayerBytesSent(b)
		forward, backward = forward+p.linears*f, backward+p.linears*back+again.linears*f
	}
	return forward, backward
}

// recomputed counts the mixers' forward halves in the backward half of a pass, and how often q, k
// and v are restored there.
func (m *Model) recomputed() (again struct{ fulls, linears int64 }, restored int64) {
	a := &m.activations
	if a.Attention == Recompute {
		for _, layer := range m.visits { // in replays of segments, and of the layer itself
			if m.Config.Linear(layer) {
				again.linears++
			} else {
				again.fulls++
			}
		}
	}
	if a.QKV == Recompute && (a.Attention != Recompute || m.plans.groups > 1) {
		restored = m.plans.fulls
	}
	return again, restored
}

// Linear is the plan that the linear layers share, nil where there are none.
func (m *Model) Linear() *gdn.Plan { return m.plans.linear }
