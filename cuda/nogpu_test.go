package cuda

import (
	"math"
	"math/rand/v2"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// NoGPU returns the same bytes as the plug-in returns for an absent GPU: for both builds, forward
// and backward, for heads that ranks divide evenly and for shards that end within a group of heads,
// in both types and memory orders.
func TestNoGPU(t *testing.T) {
	t.Run("emulated", func(t *testing.T) {
		d, _, _ := opened(t)
		if !d.Details().Emulated {
			t.Skip("SKIPPED: the plug-in is the real one")
		}
		for _, deterministic := range []bool{false, true} {
			likePlugin(t, NoGPU{Deterministic: deterministic, emulated: true}, absent(t, deterministic))
		}
	})
	t.Run("built", func(t *testing.T) {
		needBuilt(t)
		t.Setenv(variable, built)
		for _, deterministic := range []bool{false, true} {
			likePlugin(t, NoGPU{Deterministic: deterministic}, absent(t, deterministic))
		}
	})
}

// likePlugin compares the sizes of NoGPU with those that the plug-in returns, for random calls.
func likePlugin(t *testing.T, g NoGPU, d *Device) {
	t.Helper()
	c := randomCall{Rand: rand.New(rand.NewPCG(1, 2))}
	var seen struct{ attention, sdpa, delta int }
	for range 4000 {
		c.draw()
		a := c.attention()
		for _, backward := range []bool{false, true} {
			want := likeAttention(t, g, d, a, backward)
			if seen.attention++; want > 32<<20 && c.dtype == tensor.BF16 {
				seen.sdpa++
			}
		}
		if c.tq > 1<<24 {
			continue
		}
		delta := c.delta()
		got, want := g.GatedDeltaSizes(delta), d.GatedDeltaSizes(delta)
		if got != want {
			t.Fatalf("gated delta rule, %+v: %+v, the plug-in returns %+v", delta, got, want)
		}
		if want.Backward > 0 {
			seen.delta++
		}
	}
	if seen.delta < 1000 || seen.attention < 4000 || !g.emulated && seen.sdpa < 300 {
		t.Errorf("%+v: too few calls", seen)
	}
	wrong := &device.GatedDelta{K: tensor.Of(nil, tensor.F32, 5, 2, 64), V: tensor.Of(nil, tensor.F32, 5, 3, 64)}
	if got := g.GatedDeltaSizes(wrong); got != d.GatedDeltaSizes(wrong) || got.Saved != 0 {
		t.Errorf("3 value heads over 2 key heads: %+v", got)
	}
	x := tensor.Of(nil, tensor.F32, 64, 2, 64)
	wrong = &device.GatedDelta{K: x, V: x, Chunk: 15}
	if got := g.GatedDeltaSizes(wrong); got != d.GatedDeltaSizes(wrong) || got.Saved != 0 {
		t.Errorf("chunks of 15 tokens: %+v", got)
	}
}

// likeAttention compares the workspaces of a call without document bounds, and with bounds for two
// documents. It returns the former.
func likeAttention(t *testing.T, g NoGPU, d *Device, a *device.Attention, backward bool) int64 {
	t.Helper()
	got, want := g.AttentionWorkspace(a, backward), d.AttentionWorkspace(a, backward)
	if got != want {
		t.Fatalf("attention, backward %v, %+v: %d bytes, the plug-in returns %d", backward, a, got, want)
	}
	// Given documents need no more than the bound for any documents.
	if tq := a.Q.Shape[0]; tq > 0 && a.K.Shape[0] == tq {
		a.CuQ, a.CuK = []int64{0, tq / 2, tq}, []int64{0, tq / 2, tq}
		if some := g.AttentionWorkspace(a, backward); some > got || some < d.AttentionWorkspace(a, backward) {
			t.Fatalf("attention, backward %v, %+v: %d bytes for two documents, %d for any", backward, a, some, got)
		}
		a.CuQ, a.CuK = nil, nil
	}
	return want
}

// randomCall draws the shapes of calls of attention and of the gated delta rule.
type randomCall struct {
	*rand.Rand
	dtype                    tensor.DType
	tq, tk, hq, hkv, dim, dv int64
	kvHead                   []int64 // of a shard of heads; nil = equal groups
}

func (c *randomCall) pick(of ...int64) int64 { return of[c.IntN(len(of))] }

// draw draws other shapes.
func (c *randomCall) draw() {
	c.dtype = []tensor.DType{tensor.F32, tensor.BF16}[c.IntN(2)]
	c.tq = c.pick(0, 1, 2, 127, 128, 1000, 4096, 8191, 1<<20, 1<<24, 1<<24+1, 1<<32)
	c.tk = c.pick(c.tq, c.tq, c.tq, 1, 777, 1<<16)
	hkv, group := c.pick(1, 2, 3, 8), c.pick(1, 1, 2, 3, 4, 7)
	c.hkv, c.hq, c.dim = hkv, hkv*group, c.pick(8, 20, 64, 96, 128, 192, 256, 264)
	if c.dv = c.dim; c.IntN(4) == 0 {
		c.dv = c.pick(16, 128, 192)
	}
	if c.kvHead = nil; c.IntN(3) == 0 { // a shard: some query heads, and their key heads
		lo, n := c.Int64N(c.hq), int64(0)
		for h := lo; h < c.hq && n < 20; h, n = h+1, n+1 {
			c.kvHead = append(c.kvHead, h/group-lo/group)
		}
		c.hq, c.hkv = n, c.kvHead[n-1]+1
	}
}

// tensor returns a tensor without memory, in one of several memory orders.
func (c *randomCall) tensor(tokens, heads, width int64) tensor.Tensor {
	x := tensor.Of(nil, c.dtype, tokens, heads, width)
	if c.IntN(6) == 0 {
		x = tensor.Of(nil, c.dtype, heads, tokens, width).Permute(1, 0, 2)
	}
	if c.IntN(6) == 0 {
		x = tensor.Of(nil, c.dtype, tokens, heads, 2*width).Slice(2, 0, width)
	}
	x.Where = tensor.CUDA
	return x
}

func (c *randomCall) attention() *device.Attention {
	a := &device.Attention{Q: c.tensor(c.tq, c.hq, c.dim), K: c.tensor(c.tk, c.hkv, c.dim),
		V: c.tensor(c.tk, c.hkv, c.dv), Out: c.tensor(c.tq, c.hq, c.dv), KVHead: c.kvHead, Causal: c.IntN(2) == 0,
		Scale: 0.1, Deterministic: c.IntN(5) == 0}
	if c.IntN(4) == 0 {
		a.Window = &device.Window{Left: c.pick(-1, 0, 100, 1<<40), Right: c.pick(-1, 0, 5, 1<<40)}
	}
	if c.IntN(3) == 0 {
		switch c.IntN(8) {
		case 0:
			a.Slopes = tensor.Of(nil, tensor.F32, c.hq)
		case 1:
			a.Sinks, a.Slopes = tensor.Of(nil, tensor.F32, c.hq), tensor.Of(nil, tensor.F32, c.hq)
		case 2:
			a.Sinks = tensor.Of(nil, tensor.F32, c.hq)
		case 3:
			a.Shift = []int64{3, -5}
		case 4:
			a.Softcap = 30
		case 5:
			a.Dropout = 0.1
		case 6:
			a.Carry, a.Out.DType = true, tensor.F32
		case 7:
			a.BlockMask, a.QuerySeq, a.KeySeq, a.BlockRows, a.BlockColumns = tensor.Of(nil, tensor.U8, 1, 1, 1),
				9, 9, 9, 9
		}
	}
	return a
}

func (c *randomCall) delta() *device.GatedDelta {
	x := &device.GatedDelta{Q: c.tensor(c.tq, c.hkv, c.dim), K: c.tensor(c.tq, c.hkv, c.dim),
		V: c.tensor(c.tq, c.hq, c.dv), Out: c.tensor(c.tq, c.hq, c.dv), KeyHead: c.kvHead,
		Chunk: c.pick(0, 0, 16, 40, 200), Panel: c.pick(0, 0, 1, 100, 4096, math.MaxInt64)}
	if c.IntN(3) == 0 {
		x.Cu = []int64{0, c.tq / 3, c.tq / 3, c.tq}
	}
	return x
}
