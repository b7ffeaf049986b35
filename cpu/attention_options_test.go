package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// withOptions sets the options that are named in how: shift, sinks, slopes, cap, dropout, blocks
// (one mask), heads (a mask for each head), wide (gradients in F32).
func withOptions(t testing.TB, d *Device, g *device.AttentionGrad, how string) {
	a, heads := &g.Attention, g.Q.Shape[1]
	perHead := func(seed int64) tensor.Tensor { return tensor.OfFloat32(floats(t, d, heads+seed)[seed:], heads) }
	if strings.Contains(how, "shift") {
		a.Shift = make([]int64, len(a.CuQ)-1)
		for i := range a.Shift {
			a.Shift[i] = []int64{-70, 12, 3}[i%3]
		}
	}
	if strings.Contains(how, "sinks") {
		a.Sinks, g.DSinks = perHead(1), perHead(2)
	}
	if strings.Contains(how, "slopes") {
		a.Slopes, g.DSlopes = perHead(3), perHead(4)
		for h := range heads { // no weight is so small that its gradients are denormal
			*index[float32](a.Slopes.Data, h) = float32(math.Exp2(-float64(h)) * 16 / float64(a.K.Shape[0]))
		}
	}
	if strings.Contains(how, "cap") {
		a.Softcap = 2
	}
	if strings.Contains(how, "dropout") {
		a.Dropout, a.Seed, a.HeadAt, a.QueryAt, a.KeyAt = 0.2, 3, 1<<40, 1<<33, 1<<34+5
	}
	if strings.Contains(how, "blocks") || strings.Contains(how, "heads") {
		a.QuerySeq, a.KeySeq, a.QueryAt, a.KeyAt = a.Q.Shape[0], a.K.Shape[0], 0, 0
		a.BlockRows, a.BlockColumns = 64, 48
		n := int64(1)
		if strings.Contains(how, "heads") {
			n = heads
		}
		a.BlockMask = mask(t, d, n, ceilDiv(a.QuerySeq, a.BlockRows), ceilDiv(a.KeySeq, a.BlockColumns), 3)
	}
	if strings.Contains(how, "wide") {
		for _, x := range []*tensor.Tensor{&g.DQ, &g.DK, &g.DV} {
			*x = tensor.OfFloat32(floats(t, d, x.Numel()), x.Shape[0], x.Shape[1], x.Shape[2])
		}
	}
	g.Workspace = workspace(t, d, a)
}

// mask returns a block mask in which about one block of `of` is kept.
func mask(t testing.TB, d *Device, heads, rows, columns int64, of int) tensor.Tensor {
	b, err := d.Alloc(heads * rows * columns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	r := rand.New(rand.NewPCG(5, uint64(columns)))
	for i := range unsafe.Slice((*uint8)(b.Pointer()), heads*rows*columns) {
		if r.IntN(of) == 0 {
			*index[uint8](b.Pointer(), int64(i)) = 1
		}
	}
	return tensor.Of(b.Pointer(), tensor.U8, heads, rows, columns)
}

// sliceOptions restricts the options of a call to query heads [lo, hi).
func sliceOptions(g *device.AttentionGrad, lo, hi int64) {
	for _, x := range []*tensor.Tensor{&g.Sinks, &g.DSinks, &g.Slopes, &g.DSlopes} {
		if !x.IsNil() {
			*x = x.Slice(0, lo, hi)
		}
	}
	if !g.BlockMask.IsNil() && g.BlockMask.Shape[0] > 1 {
		g.BlockMask = g.BlockMask.Slice(0, lo, hi)
	}
	g.HeadAt += lo
}

// results returns a hash of the results of a call.
func results(g *device.AttentionGrad) uint64 {
	return hash(g.Out, g.DQ, g.DK, g.DV, forHash(g.LSE), forHash(g.DSinks), forHash(g.DSlopes))
}

// forHash returns a tensor with three axes. An absent tensor has no elements.
func forHash(x tensor.Tensor) tensor.Tensor {
	for !x.IsNil() && x.NDim < 3 {
		x.Shape[x.NDim], x.Stride[x.NDim] = 1, 1
		x.NDim++
	}
	return x
}

// The results of a head are bitwise equal for any number of workers and for any other heads, with
// every option.
func TestAttentionOptions(t *testing.T) {
	for _, c := range []struct {
		how    string
		causal bool
		keys   int64
		window *device.Window
	}{
		{"shift", true, 700, nil}, {"shift", false, 600, &device.Window{Left: 100, Right: 9}},
		{"sinks", true, 700, nil},
		{"slopes", true, 700, nil}, {"slopes wide", false, 650, nil}, {"cap", true, 700, nil},
		{"dropout", true, 700, nil},
		{"blocks", true, 700, nil}, {"heads", false, 640, nil},
		{"heads shift sinks wide", true, 700, &device.Window{Left: 200, Right: -1}},
		{"shift sinks slopes cap dropout heads", true, 700, nil},
	} {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			for _, isa := range ISAs() {
				t.Run(fmt.Sprintf("%s/%v/%s", c.how, dtype, isa), func(t *testing.T) {
					make := func(workers int) (*Device, *device.AttentionGrad) {
						d := open(t, isa, workers)
						k := attentionCase{cuQ: cu(700, 37), cuK: cu(c.keys, 37), heads: 6, kvHeads: 3, d: 32, dv: 24,
							causal: c.causal, window: c.window, headMajor: true}
						g := k.typed(t, d, dtype)
						withOptions(t, d, g, c.how)
						return d, g
					}
					d, g := make(1)
					both(t, d, g)
					whole := *g // with one split
					manySplits(t)
					_, g = make(1)
					both(t, d, g)
					want := results(g)
					sameSplits(t, &whole, g)
					for _, workers := range []int{2, 5} {
						d, g := make(workers)
						if both(t, d, g); results(g) != want {
							t.Errorf("%d workers change the result", workers)
						}
					}
					keyHeadAlone(t, d, g)
				})
			}
		}
	}
}

// keyHeadAlone repeats key head 1 with its query heads 2, 3 alone.
func keyHeadAlone(t *testing.T, d *Device, g *device.AttentionGrad) {
	one := *g
	for _, x := range []*tensor.Tensor{&one.Q, &one.Out, &one.LSE, &one.DOut, &one.DQ} {
		*x = x.Slice(1, 2, 4)
	}
	for _, x := range []*tensor.Tensor{&one.K, &one.V, &one.DK, &one.DV} {
		*x = x.Slice(1, 1, 2)
	}
	sliceOptions(&one, 2, 4)
	want := results(&one)
	if both(t, d, &one); results(&one) != want {
		t.Error("the results of a head depend on other heads")
	}
}

// sameSplits fails if the results of a call with several splits differ from its results with one
// split by more than rounding.
func sameSplits(t *testing.T, one, several *device.AttentionGrad) {
	t.Helper()
	for name, x := range map[string][2]tensor.Tensor{"dq": {one.DQ, several.DQ}, "dk": {one.DK, several.DK},
		"dv": {one.DV, several.DV}} {
		want := arrayOf(x[0])
		for i := range x[0].Shape[0] {
			for h := range x[0].Shape[1] {
				for e := range x[0].Shape[2] {
					*want.at(i, h, e) = element(x[0], i, h, e)
				}
			}
		}
		tolerance := 2e-6
		if x[0].DType == tensor.BF16 {
			tolerance = 0x1p-7
		}
		compare(t, name+" of several splits", x[1], want, tolerance)
	}
	if one.DSlopes.IsNil() {
		return
	}
	for h := range one.Q.Shape[1] {
		a, b := *index[float32](one.DSlopes.Data, h), *index[float32](several.DSlopes.Data, h)
		if !(math.Abs(float64(a-b)) <= 1e-5*(1+math.Abs(float64(a)))) {
			t.Errorf("dslopes of head %d is %g with several splits, %g with one", h, b, a)
		}
	}
}

// dk and dv of a key head are bitwise equal to the sum over its query heads with options, and where
// the keys of a head are divided into ranges.
func TestAttentionOptionGroups(t *testing.T) {
	for _, how := range []string{"heads", "slopes", "sinks slopes cap dropout heads"} {
		for _, isa := range ISAs()[:1] {
			for _, splits := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/%v", how, isa, splits), func(t *testing.T) {
					if splits {
						manySplits(t)
					}
					c := attentionCase{cuQ: cu(500, 700), cuK: cu(450, 9000), heads: 4, kvHeads: 1, d: 8, dv: 8,
						causal: true, headMajor: true}
					testGroup(t, &c, open(t, isa, 2), how)
				})
			}
		}
	}
}

// Keys and values of hidden blocks are not read: NaN in them reaches no result.
func TestAttentionHiddenNaN(t *testing.T) {
	for _, isa := range ISAs() {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			d := open(t, isa, 2)
			c := attentionCase{cuQ: cu(300), cuK: cu(480), heads: 4, kvHeads: 1, d: 16, dv: 16}
			g := c.typed(t, d, dtype)
			withOptions(t, d, g, "blocks")
			mask := unsafe.Slice((*uint8)(g.BlockMask.Data), g.BlockMask.Numel())
			columns := g.BlockMask.Shape[2]
			for i := range mask {
				if int64(i)%columns%3 == 1 { // hidden from all queries
					mask[i] = 0
				}
			}
			for j := range int64(480) {
				for _, x := range []tensor.Tensor{g.K, g.V} {
					p := x.Select(1, 0).Select(0, j).Data
					for e := int64(0); e < 16 && j/g.BlockColumns%3 == 1; e++ {
						if dtype == tensor.F32 {
							*index[float32](p, e) = float32(math.NaN())
						} else {
							*index[uint16](p, e) = 0x7fc0
						}
					}
				}
			}
			both(t, d, g)
			for name, x := range map[string]tensor.Tensor{"out": g.Out, "dq": g.DQ, "dk": g.DK, "dv": g.DV} {
				for i := range x.Shape[0] {
					for h := range x.Shape[1] {
						if v := element(x, i, h, 3); math.IsNaN(v) || name[1] == 'k' &&
							i/g.BlockColumns%3 == 1 && v != 0 {
							t.Fatalf("%s, %v: %s[%d, %d] is %g", isa, dtype, name, i, h, v)
						}
					}
				}
			}
		}
	}
}

// With one key, the logsumexp is the capped score: near 0 the score itself, far from it the cap.
func TestAttentionCap(t *testing.T) {
	for _, isa := range ISAs() {
		d := open(t, isa, 1)
		cuQ := make([]int64, 901)
		for i := range cuQ {
			cuQ[i] = int64(i)
		}
		c := attentionCase{cuQ: cuQ, cuK: cuQ, heads: 1, kvHeads: 1, d: 1, dv: 1}
		g := c.make(t, d)
		g.Scale, g.Softcap = 1, 30
		g.Workspace = workspace(t, d, &g.Attention)
		score := func(i int64) float64 {
			return float64(float32(math.Pow(10, float64(i%450)/50-5))) * float64(1-i/450*2)
		}
		for i := range int64(900) { // from 1e-5 to 1e4, of both signs
			*index[float32](g.Q.Data, i), *index[float32](g.K.Data, i) = float32(score(i)), 1
		}
		if err := d.AttentionForward(nil, &g.Attention); err != nil {
			t.Fatal(err)
		}
		for i := range int64(900) {
			got, want := float64(*index[float32](g.LSE.Data, i)), 30*math.Tanh(score(i)/30)
			if !(math.Abs(got-want) <= 5e-7*math.Abs(want)) {
				t.Fatalf("%s: score %g is capped to %.9g, want %.9g", isa, score(i), got, want)
			}
		}
	}
}

// A call with every option allocates nothing.
func TestAttentionOptionsAllocateNothing(t *testing.T) {
	d := open(t, "", 2)
	c := attentionCase{cuQ: cu(130, 20), cuK: cu(130, 20), heads: 4, kvHeads: 2, d: 16, dv: 16, causal: true}
	g := c.make(t, d)
	withOptions(t, d, g, "shift sinks slopes cap dropout heads")
	if n := testing.AllocsPerRun(20, func() { both(t, d, g) }); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// BenchmarkAttentionOptions reports nanoseconds of processor time for each visible pair of a head,
// forward and backward, and the ratio to the causal mask alone.
func BenchmarkAttentionOptions(b *testing.B) {
	const n, heads, dim = 4096, 4, 64
	diagonals := func(block int64) func(d *Device, a *device.Attention) float64 {
		// a sliding window of 8 blocks, and one global block: 9 of n/block blocks of a row
		return func(d *Device, a *device.Attention) float64 {
			a.QuerySeq, a.KeySeq, a.BlockRows, a.BlockColumns = n, n, block, block
			a.BlockMask = mask(b, d, 1, n/block, n/block, math.MaxInt32)
			m, rows, kept := unsafe.Slice((*uint8)(a.BlockMask.Data), a.BlockMask.Numel()), n/block, 0.0
			for i := range m {
				r, c := int64(i)/rows, int64(i)%rows
				if m[i] = 0; c == 0 || c <= r && r-c < 8 {
					m[i] = 1
					if kept += float64(block * block); c == r {
						kept -= float64(block*(block-1)) / 2
					}
				}
			}
			return kept
		}
	}
	causal := func(change func(a *device.Attention)) func(d *Device, a *device.Attention) float64 {
		return func(_ *Device, a *device.Attention) float64 { change(a); return n * (n + 1) / 2 }
	}
	for _, isa := range []string{"avx512bf16", "avx512", "avx2"} {
		if !slices.Contains(ISAs(), isa) {
			continue
		}
		dtype := tensor.F32
		if isa == "avx512bf16" { // in F32 it is avx512
			dtype = tensor.BF16
		}
		base := [2]float64{}
		for _, k := range []struct {
			name string
			set  func(d *Device, a *device.Attention) float64
		}{
			{"causal", causal(func(a *device.Attention) {})},
			{"window 512", func(_ *Device, a *device.Attention) float64 {
				a.Window = &device.Window{Left: 511, Right: 0}
				return float64(n*512 - 512*511/2)
			}},
			{"blocks of 16", diagonals(16)}, {"blocks of 64", diagonals(64)}, {"blocks of 128", diagonals(128)},
			{"sinks", causal(func(a *device.Attention) { a.Sinks = tensor.OfFloat32(make([]float32, heads), heads) })},
			{"slopes", causal(func(a *device.Attention) {
				a.Slopes = tensor.OfFloat32([]float32{.5, .25, .125, .0625}, heads)
			})},
			{"cap", causal(func(a *device.Attention) { a.Softcap = 50 })},
			{"dropout", causal(func(a *device.Attention) { a.Dropout = 0.1 })},
		} {
			b.Run(isa+"/"+k.name, func(b *testing.B) {
				d := open(b, isa, 1)
				c := attentionCase{cuQ: cu(n), cuK: cu(n), heads: heads, kvHeads: heads, d: dim, dv: dim, causal: true,
					headMajor: true}
				g := c.typed(b, d, dtype)
				pairs := k.set(d, &g.Attention) * heads
				g.Workspace = workspace(b, d, &g.Attention)
				_, spent := best(b, func() error { return d.AttentionForward(nil, &g.Attention) },
					func() error { return d.AttentionBackward(nil, g) })
				f, w := spent[0]*1e9/pairs, spent[1]*1e9/pairs
				if k.name == "causal" {
					base = [2]float64{f, w}
				}
				b.ReportMetric(f, "F-ns/pair")
				b.ReportMetric(w, "B-ns/pair")
				b.ReportMetric(f/base[0], "F/causal")
				b.ReportMetric(w/base[1], "B/causal")
			})
		}
	}
}
