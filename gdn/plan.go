// Package gdn runs the gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464) on ranks
// that hold slices of the tokens. A Plan uses one of two strategies:
//
//   - Heads: as in package sp, one all-to-all gives each rank all tokens of a slice of the heads, and a
//     second one restores token sharding. Results are bitwise equal to the results of one rank. The
//     number of bytes sent is proportional to the number of tokens.
//   - State: tokens stay on their ranks. Each rank describes the document that continues on the next
//     rank by a recurrent state and a transition matrix. One all-to-all brings these to the ranks that
//     follow, and each rank starts from the state before its first token. The number of bytes sent does
//     not depend on the number of tokens.
//
// Both strategies are exact for packed documents with any boundaries, and for any numbers of heads,
// tokens and ranks. Forward and Backward run the rule alone (the core). LayerForward and
// LayerBackward also run the causal convolution, its SiLU and the gates of Qwen3-Next and Qwen3.5.
//
// NewPlan is called once for a kind of layer, sp.NewBatch once for the lengths and documents of a
// batch. Calls run in memory of the caller and allocate nothing.
package gdn

import (
	"math"
	"slices"
	"strconv"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// Strategy is the way in which a sequence is split.
type Strategy int

const (
	Auto  Strategy = iota // the one that sends fewer bytes
	Heads                 // an all-to-all of tokens against heads
	State                 // states travel between ranks, tokens stay
)

var strategyNames = [...]string{Auto: "auto", Heads: "heads", State: "state"}

func (s Strategy) known() bool { return s >= 0 && int(s) < len(strategyNames) }

func (s Strategy) String() string {
	if !s.known() {
		return "strategy " + strconv.Itoa(int(s))
	}
	return strategyNames[s]
}

// ParseStrategy is the inverse of String.
func ParseStrategy(name string) (Strategy, error) {
	if i := slices.Index(strategyNames[:], name); i >= 0 {
		return Strategy(i), nil
	}
	return Auto, status.Errorf(status.InvalidArgument, "strategy %q: it is one of %q", name, strategyNames)
}

// Layer is a kind of layer.
type Layer struct {
	// heads of q and k; of v, a multiple of them: key head j serves value heads [j·Hv/Hk,
	// (j+1)·Hv/Hk)
	KeyHeads, ValueHeads int64
	KeyDim, ValueDim     int64 // features of a head
	// of activations: F32, or BF16 where the device computes in it; 0 = F32. Gates and states are
	// F32
	DType  tensor.DType
	Scale  float64 // of q; 0 = 1/sqrt(KeyDim)
	L2Norm bool    // q and k are normalised: x·rsqrt(Σx² + 1e-6)
	// at most so many tokens a chunk, 16 or more; 0 = the device's choice
	Chunk    int64
	Strategy Strategy
	// of a batch in all, B·S, by which Auto chooses; 0 = not known, which is Heads
	Tokens     int64
	ConvWidth  int64 // of the convolution of LayerForward; 0 = the core alone
	NoBackward bool  // no backward will be called: nothing is saved
}

// Plan is a kind of layer on the ranks of a communicator. It serves every layer of that kind and
// every batch, one call at a time.
type Plan struct {
	Admit sp.Admit

	dev        device.Device
	comm       comm.Comm
	layer      Layer // DType, Scale and Strategy resolved
	rank, size int64
	align      int64
	tokenMajor bool // local copies have tokens before heads
	why        string

	method   method
	keyHead  []int64    // local key head of each local value head; nil = all heads are local
	channels []channels // of a layer

	// Of the call under way, kept here so that no call allocates.
	cut            cut
	frame, sketch  frame            // sketch: of a call that is sized
	kept, work     device.Allocator // of Saved and of Workspace
	states         states
	written        int64 // documents whose states are in f.docs, see method.stateBehind
	args           Args
	grads          Grads
	layerArgs      LayerArgs
	layerGrads     LayerGrads
	docRows        []int64
	delta          device.GatedDelta
	deltaGrad      device.GatedDeltaGrad
	deltaState     device.DeltaState
	deltaStateGrad device.DeltaStateGrad
	conv           device.Conv1dGrad
	gates          device.DeltaGates
	gatesGrad      device.DeltaGatesGrad
}

// NewPlan settles a layer for the ranks of c. It is collective: a layer that cannot be, or differs
// between ranks, is refused on all of them alike (InvalidArgument; Unsupported for a type that the
// device does not compute in).
func NewPlan(d device.Device, c comm.Comm, l Layer) (*Plan, error) {
	info := d.Info()
	if l.DType == tensor.Invalid {
		l.DType = tensor.F32
	}
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	err := comm.Same(c, "gdn.NewPlan",
		comm.Field{Name: "key_heads", Value: number(l.KeyHeads)},
		comm.Field{Name: "value_heads", Value: number(l.ValueHeads)},
		comm.Field{Name: "key_dim", Value: number(l.KeyDim)},
		comm.Field{Name: "value_dim", Value: number(l.ValueDim)},
		comm.Field{Name: "dtype", Value: l.DType.String()},
		comm.Field{Name: "scale", Value: strconv.FormatFloat(l.Scale, 'g', -1, 64)},
		comm.Field{Name: "l2norm", Value: strconv.FormatBool(l.L2Norm)},
		comm.Field{Name: "chunk", Value: number(l.Chunk)},
		comm.Field{Name: "strategy", Value: l.Strategy.String()},
		comm.Field{Name: "tokens", Value: number(l.Tokens)},
		comm.Field{Name: "conv_width", Value: number(l.ConvWidth)},
		comm.Field{Name: "no_backward", Value: strconv.FormatBool(l.NoBackward)},
		comm.Field{Name: "device", Value: info.Kind},
		comm.Field{Name: "tokens before heads", Value: strconv.FormatBool(info.TokenMajor)},
		comm.Field{Name: "kernels", Value: info.KernelsIn(l.DType)})
	if err != nil {
		return nil, err
	}
	// The ranks hold the same layer, so each comes to the same verdict by itself.
	if err := l.check(info); err != nil {
		return nil, err
	}
	if l.Scale == 0 {
		l.Scale = 1 / math.Sqrt(float64(l.KeyDim))
	}
	p := &Plan{dev: d, comm: c, layer: l, rank: int64(c.Rank()), size: int64(c.Size()), align: max(1, info.Align), tokenMajor: info.TokenMajor}
	p.docRows = make([]int64, p.size)
	return p, p.choose()
}

// choose settles the strategy by the bytes of all ranks together for a document over all of them.
// Collective.
func (p *Plan) choose() error {
	l := &p.layer
	tokens := l.Tokens
	if tokens == 0 {
		tokens = p.size // a row for each: states do not depend on it
	}
	b, err := sp.SketchBatch(int(p.rank), int(p.size), sp.BatchSpec{Batch: 1, Seq: tokens})
	if err != nil {
		return err
	}
	c := cut{batch: b}
	c.line.fill(b)
	byHeads, byState := newHeadsMethod(p), newStateMethod(p, &c.line)
	total := func(m method) (sum int64) {
		for rank := range p.size {
			for _, backward := range []bool{false, true} {
				sum += m.sent(&c, rank, call{layer: l.ConvWidth > 0, backward: backward})
			}
		}
		return sum
	}
	heads, state := total(byHeads), total(byState)
	asked := l.Strategy
	if asked == Auto {
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
	p.why, p.channels = p.describe(asked, heads, state), p.channelsOf()
	return err
}

func (l Layer) check(info device.Info) error {
	for _, f := range []struct {
		name         string
		value, least int64
	}{{"key_heads", l.KeyHeads, 1}, {"value_heads", l.ValueHeads, 1}, {"key_dim", l.KeyDim, 1}, {"value_dim", l.ValueDim, 1},
		{"tokens", l.Tokens, 0}, {"conv_width", l.ConvWidth, 0}} {
		if f.value < f.least {
			return status.Errorf(status.InvalidArgument, "gdn.NewPlan: %s %d: set it to %d or more", f.name, f.value, f.least)
		}
	}
	if l.ValueHeads%l.KeyHeads != 0 {
		return status.Errorf(status.InvalidArgument,
			"gdn.NewPlan: %d value heads over %d key heads: the first must be a multiple of the second", l.ValueHeads, l.KeyHeads)
	}
	if widest := info.DeltaHead; widest > 0 && max(l.KeyDim, l.ValueDim) > widest {
		return status.Errorf(status.Unsupported, "gdn.NewPlan: key_dim %d, value_dim %d: device %s has a gated delta rule for heads of %d features at most: use device.backend = \"cpu\"",
			l.KeyDim, l.ValueDim, info.Kind, widest)
	}
	if l.Chunk != 0 && l.Chunk < 16 {
		return status.Errorf(status.InvalidArgument, "gdn.NewPlan: chunk %d: set it to 16 or more, or to 0 for the device's choice", l.Chunk)
	}
	if !l.Strategy.known() {
		return status.Errorf(status.InvalidArgument, "gdn.NewPlan: %v: it is one of %q", l.Strategy, strategyNames)
	}
	if math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0) {
		return status.Errorf(status.InvalidArgument, "gdn.NewPlan: scale %v: set a finite number, or 0 for 1/sqrt(%d)", l.Scale, l.KeyDim)
	}
	if !slices.Contains(info.Compute, l.DType) {
		return status.Errorf(status.Unsupported, "gdn.NewPlan: dtype %v: device %s computes in %v", l.DType, info.Kind, info.Compute)
	}
	return nil
}

// Layer is what the plan was made for, its type, scale and strategy resolved.
func (p *Plan) Layer() Layer { return p.layer }

// Strategy is Heads or State.
func (p *Plan) Strategy() Strategy { return p.layer.Strategy }

// Heads gives the value heads [lo, hi) that this rank computes and the key heads [keyLo, keyHi)
// under them: all with State.
func (p *Plan) Heads() (lo, hi, keyLo, keyHi int64) {
	return p.method.headRange(p.rank)
}

// headsOf is the value heads of a rank and the key heads under them.
func headsOf(l Layer, size, rank int64) (lo, hi, keyLo, keyHi int64) {
	lo, hi = comm.Shard(l.ValueHeads, size, rank)
	if lo == hi {
		return lo, hi, 0, 0
	}
	group := l.ValueHeads / l.KeyHeads
	return lo, hi, lo / group, (hi-1)/group + 1
}

// String says how the plan works and why, with the bytes that travel, in one line.
func (p *Plan) String() string { return p.why }
