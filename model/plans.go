package model

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// plans are the plans of the kinds of mixers, and the number of layers of each kind. The plan of a
// kind without layers is nil.
type plans struct {
	softmax   [masks]*sp.Plan           // softmax attention, of one group of heads
	groups    int64                     // number of head groups
	grouped   map[int64][masks]*sp.Plan // by number of head groups
	linear    *gdn.Plan
	softmaxes [masks]int64
	linears   int64
	ring      int64
	overlap   bool // projections overlap with all-to-alls
	gather    bool // the groups of a ring get all keys in one all-to-all
	comm      comm.Comm

	cached       sizes // for cachedTokens tokens; cached.full is for fullTokens
	cachedTokens int64
	fullTokens   int64
}

// sizes are the bytes that a call of each plan needs.
type sizes struct {
	full   struct{ saved, lse, workspace int64 } // of one group of heads of either mask, padded
	linear gdn.Sizes
}

func (p *plans) make(d device.Device, c comm.Comm, cfg *Config, o Options) (err error) {
	p.linears = cfg.LinearLayers()
	p.softmaxes = cfg.softmaxLayers()
	p.grouped, p.comm, p.ring, p.overlap = map[int64][masks]*sp.Plan{}, c, o.Ring, o.Overlap && c.Size() > 1
	p.gather = o.Gather && o.Ring > 1
	if widest := d.Info().AttentionHead; widest > 0 && p.softmaxes != ([masks]int64{}) {
		if name, dim := cfg.widestHead(); dim > widest {
			return status.Errorf(status.Unsupported,
				"%s = %d: attention of device %s supports at most %d; set device.backend = \"cpu\"", name, dim,
				d.Info().Kind, widest)
		}
	}
	err = p.setGroups(d, c, cfg, o.Compute, 1)
	if err == nil && p.linears > 0 {
		p.linear, err = gdn.NewPlan(d, c,
			gdn.Layer{KeyHeads: cfg.LinearNumKeyHeads, ValueHeads: cfg.LinearNumValueHeads,
				KeyDim: cfg.LinearKeyHeadDim, ValueDim: cfg.LinearValueHeadDim, DType: o.Compute, L2Norm: true,
				Strategy: o.Strategy, Tokens: o.Tokens,
				ConvWidth: cfg.LinearConvKernelDim})
	}
	return err
}

// setGroups sets the number of head groups of softmax attention. Collective if the number is new.
func (p *plans) setGroups(d device.Device, c comm.Comm, cfg *Config, compute tensor.DType, groups int64) (err error) {
	made, found := p.grouped[groups]
	for k := range masks {
		if p.softmaxes[k] == 0 || found {
			continue
		}
		made[k], err = sp.NewPlan(d, c,
			sp.Layer{Heads: cfg.NumAttentionHeads / groups, KVHeads: cfg.NumKeyValueHeads / groups, Dim: cfg.HeadDim,
				VDim: cfg.ValueDim(), DType: compute, Causal: true, Window: cfg.window(k), Scale: cfg.ScoreScale,
				Softcap: cfg.ScoreSoftcap, Dropout: cfg.AttentionDropout, Sinks: cfg.Sinks(), Ring: p.ring,
				Gather: p.gather, Overlapped: p.overlap && groups == 1})
		if err != nil {
			return err
		}
	}
	p.grouped[groups] = made
	if p.groups != groups {
		p.fullTokens = 0
	}
	p.softmax, p.groups, p.cachedTokens = made, groups, 0
	return nil
}

// sizes returns the sizes for sequences of so many tokens with any documents. They are the same for
// planning and for a pass.
func (p *plans) sizes(d device.Device, tokens int64) (s sizes, err error) {
	if p.cachedTokens == tokens {
		return p.cached, nil
	}
	p.cachedTokens = 0
	if p.fullTokens != tokens { // for a ring of many ranks, these take the longest
		if s, err = p.maxFullSizes(d, tokens); err != nil {
			return s, err
		}
		p.cached.full, p.fullTokens = s.full, tokens
	}
	if p.linear != nil {
		if p.cached.linear, err = p.linear.MaxLayerSizes(1, tokens); err != nil {
			return s, err
		}
	}
	p.cachedTokens = tokens
	return p.cached, nil
}

func (p *plans) maxFullSizes(d device.Device, tokens int64) (s sizes, err error) {
	for _, plan := range p.softmax {
		if plan == nil || err != nil {
			continue
		}
		var whole sp.Sizes
		if whole, err = plan.MaxSizes(1, tokens, tokens); err != nil {
			continue
		}
		saved, lse, failed := plan.MaxSeparateSizes(1, tokens, tokens)
		f := &s.full
		f.workspace = max(f.workspace, whole.Workspace)
		f.saved, f.lse = max(f.saved, device.Padded(d, saved)), max(f.lse, device.Padded(d, lse))
		err = failed
	}
	return s, err
}

// Reserve makes the communicator allocate, before the first pass, the memory that it needs for
// batches of at most so many tokens. Collective.
func (m *Model) Reserve(tokens int64) (err error) {
	for _, plan := range m.plans.softmax {
		if err == nil && plan != nil {
			err = plan.Reserve(1, tokens, tokens)
		}
	}
	if err == nil && m.plans.linear != nil {
		err = m.plans.linear.Reserve(1, tokens)
	}
	return err
}

// BytesSent returns the bytes that this rank's mixers send to other ranks in a Forward, and those
// that they send in addition in the backward half of a ForwardBackward, with recomputation.
func (m *Model) BytesSent(b *sp.Batch) (forward, backward int64) {
	if m.isAlone(b) {
		return 0, 0
	}
	again, restored := m.recomputed()
	for k, plan := range m.plans.softmax {
		if plan == nil {
			continue
		}
		f, back := plan.BytesSent(b)
		layers, groups := m.plans.softmaxes[k], m.plans.groups
		forward += layers * groups * f
		backward += groups * (layers*back + again.softmaxes[k]*f + restored[k]*plan.RestoreBytesSent(b))
	}
	if p := &m.plans; p.linear != nil {
		f, back := p.linear.LayerBytesSent(b)
		forward, backward = forward+p.linears*f, backward+p.linears*back+again.linears*f
	}
	return forward, backward
}

// recomputed returns how many forward halves of mixers the backward half of a pass runs, and how
// often it restores q, k and v.
func (m *Model) recomputed() (again struct {
	softmaxes [masks]int64
	linears   int64
}, restored [masks]int64) {
	a := &m.activations
	if a.Attention == Recompute {
		for _, layer := range m.visits { // again in a segment, and before its own backward half
			if m.Config.Linear(layer) {
				again.linears++
			} else {
				again.softmaxes[m.Config.maskOf(layer)]++
			}
		}
	}
	if a.QKV == Recompute && (a.Attention != Recompute || m.plans.groups > 1) {
		restored = m.plans.softmaxes
	}
	return again, restored
}

// fulls returns the number of layers of softmax attention.
func (p *plans) fulls() int64 { return p.softmaxes[fullMask] + p.softmaxes[slidingMask] }

// Linear returns the plan of the linear layers, nil if there are none.
func (m *Model) Linear() *gdn.Plan { return m.plans.linear }
