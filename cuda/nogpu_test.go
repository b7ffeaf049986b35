package cuda

import (
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
			t.Skip("SKIPPED: the plug-in is one for GPUs")
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

func likePlugin(t *testing.T, g NoGPU, d *Device) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	pick := func(of ...int64) int64 { return of[r.IntN(len(of))] }
	type asked struct{ attention, sdpa, delta int }
	var seen asked
	for range 4000 {
		dtype := []tensor.DType{tensor.F32, tensor.BF16}[r.IntN(2)]
		tq := pick(0, 1, 2, 127, 128, 1000, 4096, 8191, 1<<20, 1<<24, 1<<24+1, 1<<32)
		tk := pick(tq, tq, tq, 1, 777, 1<<16)
		hkv, group := pick(1, 2, 3, 8), pick(1, 1, 2, 3, 4, 7)
		hq, dim, dv := hkv*group, pick(8, 20, 64, 96, 128, 192, 256, 264), int64(0)
		if dv = dim; r.IntN(4) == 0 {
			dv = pick(16, 128, 192)
		}
		var kvHead []int64
		if r.IntN(3) == 0 { // a shard: some query heads, and their key heads
			lo, n := r.Int64N(hq), int64(0)
			for h := lo; h < hq && n < 20; h, n = h+1, n+1 {
				kvHead = append(kvHead, h/group-lo/group)
			}
			hq, hkv = n, kvHead[n-1]+1
		}
		of := func(tokens, heads, width int64) tensor.Tensor {
			x := tensor.Of(nil, dtype, tokens, heads, width)
			if r.IntN(6) == 0 {
				x = tensor.Of(nil, dtype, heads, tokens, width).Permute(1, 0, 2)
			}
			if r.IntN(6) == 0 {
				x = tensor.Of(nil, dtype, tokens, heads, 2*width).Slice(2, 0, width)
			}
			x.Where = tensor.CUDA
			return x
		}
		a := &device.Attention{Q: of(tq, hq, dim), K: of(tk, hkv, dim), V: of(tk, hkv, dv), Out: of(tq, hq, dv), KVHead: kvHead,
			Causal: r.IntN(2) == 0, Scale: 0.1, Deterministic: r.IntN(5) == 0}
		if r.IntN(4) == 0 {
			a.Window = &device.Window{Left: pick(-1, 0, 100, 1<<40), Right: pick(-1, 0, 5, 1<<40)}
		}
		for _, backward := range []bool{false, true} {
			got, want := g.AttentionWorkspace(a, backward), d.AttentionWorkspace(a, backward)
			if got != want {
				t.Fatalf("attention, backward %v, %+v: %d bytes, the plug-in says %d", backward, a, got, want)
			}
			if seen.attention++; want > 32<<20 && dtype == tensor.BF16 {
				seen.sdpa++
			}
			if tq > 0 && tk == tq { // given documents need no more than the bound for any documents
				a.CuQ, a.CuK = []int64{0, tq / 2, tq}, []int64{0, tq / 2, tq}
				if some := g.AttentionWorkspace(a, backward); some > got || some < d.AttentionWorkspace(a, backward) {
					t.Fatalf("attention, backward %v, %+v: %d bytes for two documents, %d for any", backward, a, some, got)
				}
				a.CuQ, a.CuK = nil, nil
			}
		}
		if tq > 1<<24 {
			continue
		}
		delta := &device.GatedDelta{Q: of(tq, hkv, dim), K: of(tq, hkv, dim), V: of(tq, hq, dv), Out: of(tq, hq, dv), KeyHead: kvHead, Chunk: pick(0, 0, 16, 40, 200)}
		if r.IntN(3) == 0 {
			delta.Cu = []int64{0, tq / 3, tq / 3, tq}
		}
		got, want := g.GatedDeltaSizes(delta), d.GatedDeltaSizes(delta)
		if got != want {
			t.Fatalf("gated delta rule, %+v: %+v, the plug-in says %+v", delta, got, want)
		}
		if want.Backward > 0 {
			seen.delta++
		}
	}
	if seen.delta < 1000 || seen.attention < 4000 || !g.emulated && seen.sdpa < 300 {
		t.Errorf("%+v: too little was asked", seen)
	}
	wrong := &device.GatedDelta{K: tensor.Of(nil, tensor.F32, 5, 2, 64), V: tensor.Of(nil, tensor.F32, 5, 3, 64)}
	if got := g.GatedDeltaSizes(wrong); got != d.GatedDeltaSizes(wrong) || got.Saved != 0 {
		t.Errorf("3 value heads over 2 key heads: %+v", got)
	}
}
