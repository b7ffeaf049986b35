package model

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/sp"
)

// plans are the plans that layers of a kind share, and how many share them. A kind that no layer has has none.
type plans struct {
	full           *sp.Plan
	linear         *gdn.Plan
	fulls, linears int64
}

// sizes is the memory that a call of a plan needs.
type sizes struct {
	full   sp.Sizes
	linear gdn.Sizes
}

func (p *plans) make(d device.Device, c comm.Comm, cfg *Config, o Options) (err error) {
	p.linears = cfg.LinearLayers()
	p.fulls = cfg.NumHiddenLayers - p.linears
	if p.fulls > 0 {
		p.full, err = sp.NewPlan(d, c, sp.Layer{Heads: cfg.NumAttentionHeads, KVHeads: cfg.NumKeyValueHeads, Dim: cfg.HeadDim, VDim: cfg.HeadDim,
			DType: o.Compute, Causal: true})
	}
	if err == nil && p.linears > 0 {
		p.linear, err = gdn.NewPlan(d, c, gdn.Layer{KeyHeads: cfg.LinearNumKeyHeads, ValueHeads: cfg.LinearNumValueHeads,
			KeyDim: cfg.LinearKeyHeadDim, ValueDim: cfg.LinearValueHeadDim, DType: o.Compute, L2Norm: true, Strategy: o.Strategy, Tokens: o.Tokens,
			ConvWidth: cfg.LinearConvKernelDim})
	}
	return err
}

func (p *plans) maxSizes(tokens int64) (s sizes, err error) {
	if p.full != nil {
		s.full, err = p.full.MaxSizes(1, tokens, tokens)
	}
	if err == nil && p.linear != nil {
		s.linear, err = p.linear.MaxLayerSizes(1, tokens)
	}
	return s, err
}

// Reserve has the communicator make, before the first pass, what it needs beside tensors for batches of at most so many tokens.
func (m *Model) Reserve(tokens int64) (err error) {
	if m.plans.full != nil {
		err = m.plans.full.Reserve(1, tokens, tokens)
	}
	if err == nil && m.plans.linear != nil {
		err = m.plans.linear.Reserve(1, tokens)
	}
	return err
}

// BytesSent is what the formulas say that this rank's mixers send to others in one Forward, and on top of it in the backward half of one
// ForwardBackward.
func (m *Model) BytesSent(b *sp.Batch) (forward, backward int64) {
	if p := &m.plans; p.full != nil {
		f, back := p.full.BytesSent(b)
		forward, backward = p.fulls*f, p.fulls*back
	}
	if p := &m.plans; p.linear != nil {
		f, back := p.linear.LayerBytesSent(b)
		forward, backward = forward+p.linears*f, backward+p.linears*back
	}
	return forward, backward
}

// Linear is the plan that the linear layers share, nil where there are none.
func (m *Model) Linear() *gdn.Plan { return m.plans.linear }
