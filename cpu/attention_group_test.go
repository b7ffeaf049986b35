package cpu

import (
	"fmt"
	"math"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// queryHeads returns the call for query heads [lo, hi) of key head 0, with dk and dv in memory of
// its own.
func queryHeads(t *testing.T, d *Device, g *device.AttentionGrad, lo, hi int64) *device.AttentionGrad {
	own := func(x tensor.Tensor) tensor.Tensor {
		return tensor.OfFloat32(floats(t, d, x.Shape[0]*x.Shape[2]), 1, x.Shape[0], x.Shape[2]).Permute(1, 0, 2)
	}
	of := func(x tensor.Tensor) tensor.Tensor { return x.Slice(1, lo, hi) }
	s := *g
	s.Q, s.Out, s.LSE, s.DOut, s.DQ = of(g.Q), of(g.Out), of(g.LSE), of(g.DOut), of(g.DQ)
	s.DK, s.DV = own(g.DK), own(g.DV)
	sliceOptions(&s, lo, hi)
	s.Workspace = workspace(t, d, &s.Attention)
	return &s
}

// dk and dv of a key head are bitwise equal to the sum over its query heads, in their order.
// Therefore, if a group of n query heads is split over ranks whose results are added, an element
// changes by at most n·2^-24·Σ|the query heads' elements|. out and dq do not change.
func TestAttentionGroups(t *testing.T) {
	for _, c := range []attentionCase{
		{name: "causal", cuQ: cu(700, 37, 190), d: 40, dv: 24, causal: true},
		{name: "full", cuQ: cu(500, 3), d: 16, dv: 16},
		{name: "window", cuQ: cu(800, 37), d: 16, dv: 24, window: &device.Window{Left: 70, Right: 133}},
		{name: "ranges of keys", cuQ: cu(500, 4500), d: 8, dv: 8, causal: true},
		{name: "ranges of keys, window", cuQ: cu(500, 4500), d: 8, dv: 8, causal: true,
			window: &device.Window{Left: 1000, Right: 0}},
	} {
		for _, group := range []int64{4, 8} {
			if group > 4 && c.cuQ[len(c.cuQ)-1] > 4000 {
				continue // slow, and the code is the same
			}
			for _, splits := range []bool{false, true} {
				for _, isa := range ISAs() {
					t.Run(fmt.Sprintf("%s/%d/%v/%s", c.name, group, splits, isa), func(t *testing.T) {
						if splits {
							manySplits(t)
						}
						c.cuK, c.heads, c.kvHeads, c.headMajor = c.cuQ, group, 1, true
						testGroup(t, &c, open(t, isa, 2), "")
					})
				}
			}
		}
	}
}

// testGroup runs a case with options, see withOptions.
func testGroup(t *testing.T, c *attentionCase, d *Device, how string) {
	g := c.make(t, d)
	withOptions(t, d, g, how)
	both(t, d, g)
	sums := func(lo, hi int64) *device.AttentionGrad {
		s := queryHeads(t, d, g, lo, hi)
		before := hash(s.Out, s.DQ, forHash(s.DSinks), forHash(s.DSlopes))
		both(t, d, s)
		if hash(s.Out, s.DQ, forHash(s.DSinks), forHash(s.DSlopes)) != before {
			t.Fatalf("out or dq of query heads [%d, %d) differ if they are computed alone", lo, hi)
		}
		return s
	}
	heads := make([]*device.AttentionGrad, c.heads)
	for h := range heads {
		heads[h] = sums(int64(h), int64(h)+1)
	}
	dk := func(g *device.AttentionGrad) tensor.Tensor { return g.DK }
	dv := func(g *device.AttentionGrad) tensor.Tensor { return g.DV }
	for name, pick := range map[string]func(*device.AttentionGrad) tensor.Tensor{"dk": dk, "dv": dv} {
		whole := pick(g)
		// added returns the sum of an element over some calls, in order and in F32, and the sum of
		// the magnitudes.
		added := func(of []*device.AttentionGrad, i, e int64) (sum float32, magnitude float64) {
			for j, s := range of {
				x := element(pick(s), i, 0, e)
				if magnitude += math.Abs(x); j == 0 {
					sum = float32(x)
				} else {
					sum += float32(x)
				}
			}
			return sum, magnitude
		}
		for i := range whole.Shape[0] {
			for e := range whole.Shape[2] {
				sum, _ := added(heads, i, e)
				if got := element(whole, i, 0, e); float64(sum) != got {
					t.Fatalf("%s[%d, %d] is %v, and the sum over its query heads is %v", name, i, e, got, sum)
				}
			}
		}
		for _, ranks := range []int64{2, 4} {
			var shares []*device.AttentionGrad
			for r := range ranks {
				shares = append(shares, sums(r*c.heads/ranks, (r+1)*c.heads/ranks))
			}
			worst := 0.0
			for i := range whole.Shape[0] {
				for e := range whole.Shape[2] {
					sum, _ := added(shares, i, e)
					_, magnitude := added(heads, i, e)
					if delta := math.Abs(float64(sum) - element(whole, i, 0, e)); !(delta <= worst*magnitude) {
						worst = delta / magnitude
					}
				}
			}
			if bound := float64(c.heads) * 0x1p-24; !(worst <= bound) {
				t.Errorf("%s: over %d ranks the difference is %.2f of the bound", name, ranks, worst/bound)
			}
		}
	}
}
