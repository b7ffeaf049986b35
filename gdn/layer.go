package gdn

import (
	"math"
	"slices"
	"strconv"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Strategy is how the ranks divide the work on a sequence.
type Strategy int

const (
	Auto  Strategy = iota // the strategy that sends fewer bytes
	Heads                 // an all-to-all reshards from tokens to heads
	State                 // tokens stay on their ranks, recurrent states are sent
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
	return Auto, status.Errorf(status.InvalidArgument, "strategy %q: unknown; use one of %q", name, strategyNames)
}

// Layer is a kind of layer.
type Layer struct {
	// numbers of heads of q and k, and of v. ValueHeads is a multiple of KeyHeads; key head j
	// serves the value heads [j·Hv/Hk, (j+1)·Hv/Hk)
	KeyHeads, ValueHeads int64
	KeyDim, ValueDim     int64 // features of a head
	// type of activations: F32, or BF16 where the device computes in it; 0 = F32. Gates and states
	// are F32
	DType  tensor.DType
	Scale  float64 // factor of q; 0 = 1/sqrt(KeyDim)
	L2Norm bool    // normalize q and k: x·rsqrt(Σx² + 1e-6)
	Chunk  int64   // largest number of tokens of a chunk, at least 16; 0 = the device's choice
	// tokens of a rank for which a GPU has intermediate results at a time, at least two chunks; 0 =
	// the device's choice. SetPanel changes it
	Panel int64

	Strategy Strategy
	// tokens of a batch over all sequences and ranks, by which Auto chooses; 0 = unknown: Auto
	// chooses Heads
	Tokens     int64
	ConvWidth  int64 // width of LayerForward's convolution; 0 = only the core is used
	GatedNorm  bool  // LayerForward ends with the gated RMS norm, see LayerArgs
	NoBackward bool  // no backward call will follow: nothing is saved
	// Deterministic: with Heads, results are bitwise equal for every number of ranks. They always
	// are on the CPU; on a GPU, the results of other numbers of ranks are equal up to rounding
	// without it
	Deterministic bool
}

// check returns an error if no device, or not the device of info, can run the layer.
func (l Layer) check(info device.Info) error {
	for _, f := range []struct {
		name         string
		value, least int64
	}{
		{"key_heads", l.KeyHeads, 1},
		{"value_heads", l.ValueHeads, 1},
		{"key_dim", l.KeyDim, 1},
		{"value_dim", l.ValueDim, 1},
		{"tokens", l.Tokens, 0},
		{"panel", l.Panel, 0},
		{"conv_width", l.ConvWidth, 0},
	} {
		if f.value < f.least {
			return status.Errorf(status.InvalidArgument, "gdn.NewPlan: %s %d: set it to %d or more", f.name,
				f.value, f.least)
		}
	}
	if l.ValueHeads%l.KeyHeads != 0 {
		return status.Errorf(status.InvalidArgument,
			"gdn.NewPlan: value_heads %d is no multiple of key_heads %d; make it a multiple", l.ValueHeads, l.KeyHeads)
	}
	if widest := info.DeltaHead; widest > 0 && max(l.KeyDim, l.ValueDim) > widest {
		return status.Errorf(status.Unsupported,
			"gdn.NewPlan: key_dim %d, value_dim %d: device %s supports heads of at most %d features in the gated delta rule; use device.backend = \"cpu\"",
			l.KeyDim, l.ValueDim, info.Kind, widest)
	}
	if l.Chunk != 0 && l.Chunk < 16 {
		return status.Errorf(status.InvalidArgument,
			"gdn.NewPlan: chunk %d: set it to 16 or more, or to 0 for the device's choice", l.Chunk)
	}
	if !l.Strategy.known() {
		return status.Errorf(status.InvalidArgument, "gdn.NewPlan: %v: unknown; use one of %q", l.Strategy,
			strategyNames)
	}
	if math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0) {
		return status.Errorf(status.InvalidArgument, "gdn.NewPlan: scale %v: set a finite number, or 0 for 1/sqrt(%d)",
			l.Scale, l.KeyDim)
	}
	if !slices.Contains(info.Compute, l.DType) {
		return status.Errorf(status.Unsupported, "gdn.NewPlan: dtype %v: device %s computes in %v; use one of them",
			l.DType, info.Kind, info.Compute)
	}
	return nil
}

// fields are the values that all ranks must pass to NewPlan alike.
func (l Layer) fields() []comm.Field {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	return []comm.Field{
		{Name: "key_heads", Value: number(l.KeyHeads)},
		{Name: "value_heads", Value: number(l.ValueHeads)},
		{Name: "key_dim", Value: number(l.KeyDim)},
		{Name: "value_dim", Value: number(l.ValueDim)},
		{Name: "dtype", Value: l.DType.String()},
		{Name: "scale", Value: strconv.FormatFloat(l.Scale, 'g', -1, 64)},
		{Name: "l2norm", Value: strconv.FormatBool(l.L2Norm)},
		{Name: "chunk", Value: number(l.Chunk)},
		{Name: "strategy", Value: l.Strategy.String()},
		{Name: "tokens", Value: number(l.Tokens)},
		{Name: "conv_width", Value: number(l.ConvWidth)},
		{Name: "gated_norm", Value: strconv.FormatBool(l.GatedNorm)},
		{Name: "no_backward", Value: strconv.FormatBool(l.NoBackward)},
		{Name: "deterministic", Value: strconv.FormatBool(l.Deterministic)},
	}
}

// headRange is a range of value heads [lo, hi), and the key heads [keyLo, keyHi) that they use.
type headRange struct{ lo, hi, keyLo, keyHi int64 }

func (h headRange) values() int64 { return h.hi - h.lo }
func (h headRange) keys() int64   { return h.keyHi - h.keyLo }

// allHeads is the range of all heads.
func (l *Layer) allHeads() headRange { return headRange{0, l.ValueHeads, 0, l.KeyHeads} }

// headShard is the range of a rank if the value heads are sharded.
func (l *Layer) headShard(size, rank int64) headRange {
	lo, hi := comm.Shard(l.ValueHeads, size, rank)
	if lo == hi {
		return headRange{lo: lo, hi: hi}
	}
	group := l.ValueHeads / l.KeyHeads
	return headRange{lo, hi, lo / group, (hi-1)/group + 1}
}

// Channels returns the number of features of q|k|v.
func (l *Layer) Channels() int64 { return 2*l.KeyHeads*l.KeyDim + l.ValueHeads*l.ValueDim }

// channelRange is a range [lo, hi) of the local features of q|k|v. Its weights begin at the line
// row of the convolution's weight matrix.
type channelRange struct{ lo, hi, row int64 }

// channelRanges returns the ranges of q, k and v of the heads of a rank, or a single range if the
// rank has all heads.
func (l *Layer) channelRanges(h headRange) []channelRange {
	keys, values := h.keys()*l.KeyDim, h.values()*l.ValueDim
	if all := l.Channels(); 2*keys+values == all {
		return []channelRange{{0, all, 0}}
	}
	return []channelRange{
		{0, keys, h.keyLo * l.KeyDim},
		{keys, 2 * keys, (l.KeyHeads + h.keyLo) * l.KeyDim},
		{2 * keys, 2*keys + values, 2*l.KeyHeads*l.KeyDim + h.lo*l.ValueDim},
	}
}
