package ref

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"ulysses/testkit/near"
)

func normal(r *rand.Rand, n int64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

func dot(x, y []float64) (s float64) {
	for i := range x {
		s += x[i] * y[i]
	}
	return s
}

// sameSlope compares a gradient with central differences of loss in every element of x. With the
// step 1e-5, their errors are near 1e-10.
func sameSlope(t *testing.T, name string, x, gradient []float64, loss func() float64) {
	t.Helper()
	const step = 1e-5
	if len(gradient) != len(x) {
		t.Fatalf("%s: %d slopes for %d elements", name, len(gradient), len(x))
	}
	for i, was := range x {
		x[i] = was + step
		up := loss()
		x[i] = was - step
		down := loss()
		x[i] = was
		slope := (up - down) / (2 * step)
		near.Value(t, fmt.Sprintf("gradient of %s[%d]", name, i), gradient[i], slope, 1e-7*(1+math.Abs(slope)))
	}
}

func TestRMSNormGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	const rows, n, eps = 3, 5, 0.01
	for _, centre := range []float64{0, 1} {
		x, w, dy := normal(r, rows*n), normal(r, n), normal(r, rows*n)
		loss := func() float64 { y, _ := RMSNorm(n, x, w, centre, eps); return dot(y, dy) }
		_, rstd := RMSNorm(n, x, w, centre, eps)
		dw := make([]float64, n)
		dx := RMSNormGrad(n, x, w, centre, rstd, dy, dw)
		sameSlope(t, "dx", x, dx, loss)
		sameSlope(t, "dw", w, dw, loss)
	}
}

func TestSwiGLUGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	gate, up, dy := normal(r, 20), normal(r, 20), normal(r, 20)
	loss := func() float64 { return dot(SwiGLU(gate, up), dy) }
	dgate, dup := SwiGLUGrad(gate, up, dy)
	sameSlope(t, "dgate", gate, dgate, loss)
	sameSlope(t, "dup", up, dup, loss)
}

func TestRopeGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 3))
	const tokens, heads, dim, rotary = 3, 2, 7, 4
	cos, sin := RopeTable[float64]([]int64{0, 5, 1000}, RopeFrequencies(10000, rotary), 0)
	x, dy := normal(r, tokens*heads*dim), normal(r, tokens*heads*dim)
	loss := func() float64 { return dot(Rope(tokens, heads, dim, x, cos, sin, false), dy) }
	sameSlope(t, "dx", x, Rope(tokens, heads, dim, dy, cos, sin, true), loss)
}

func TestEmbeddingGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 4))
	const n = 3
	ids := []int64{2, 0, 2, 4}
	table, dy := normal(r, 5*n), normal(r, int64(len(ids)*n))
	dtable := make([]float64, len(table))
	EmbeddingGrad(n, ids, dy, dtable)
	sameSlope(t, "dtable", table, dtable, func() float64 { return dot(Embedding(n, table, ids), dy) })
}

func TestCrossEntropyGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	const vocab, scale = 6, 0.3
	targets := []int64{5, Ignored, 0}
	logits := normal(r, int64(vocab*len(targets)))
	_, dlogits := CrossEntropy(vocab, logits, targets, scale)
	sameSlope(t, "dlogits", logits, dlogits, func() float64 {
		nll, _ := CrossEntropy(vocab, logits, targets, 1)
		return Sum(nll) * scale
	})
}

func TestAttentionGradient(t *testing.T) {
	mask := []uint8{1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0} // [2, 3, 2], of 5 queries and 5 keys
	for name, a := range map[string]*Attention{
		"full": {Hq: 2, Hkv: 2, D: 3, Dv: 3, CuQ: []int64{0, 5}, CuK: []int64{0, 5}, Scale: 0.7},
		"causal": {Hq: 4, Hkv: 2, D: 3, Dv: 2, CuQ: []int64{0, 5}, CuK: []int64{0, 5}, Causal: true,
			Scale: 0.7},
		"fewer keys": {Hq: 1, Hkv: 1, D: 1, Dv: 3, CuQ: []int64{0, 5}, CuK: []int64{0, 3}, Causal: true,
			Scale: 1.3},
		"more keys": {Hq: 1, Hkv: 1, D: 4, Dv: 1, CuQ: []int64{0, 2}, CuK: []int64{0, 5}, Causal: true,
			Scale: 0.5},
		"documents": {Hq: 2, Hkv: 1, D: 2, Dv: 2, CuQ: []int64{0, 3, 3, 4, 7}, CuK: []int64{0, 3, 5, 6, 9},
			Causal: true, Scale: 0.7},
		"window": {Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 6}, CuK: []int64{0, 6},
			Window: &Window{Left: 2, Right: 1}, Scale: 0.7},
		"causal window": {Hq: 1, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 4, 9}, CuK: []int64{0, 6, 8}, Causal: true,
			Window: &Window{Left: 1, Right: -1}, Scale: 0.7},
		"uneven grouped": {Hq: 3, Hkv: 3, D: 2, Dv: 2, CuQ: []int64{0, 4}, CuK: []int64{0, 4}, KVHead: []int64{0, 0, 2},
			Causal: true, Scale: 0.7},
		"shift": {Hq: 1, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 4, 9}, CuK: []int64{0, 6, 8},
			Shift: []int64{-1, -2}, Causal: true, Scale: 0.7},
		"sinks": {Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 5}, CuK: []int64{0, 3}, Causal: true,
			Sinks: []float64{0.7, -3}, Scale: 0.7},
		"slopes": {Hq: 2, Hkv: 2, D: 3, Dv: 2, CuQ: []int64{0, 5}, CuK: []int64{0, 6},
			Slopes: []float64{0.5, -0.2}, Scale: 0.7},
		"softcap": {Hq: 1, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 5}, CuK: []int64{0, 5}, Softcap: 1.3, Scale: 2},
		"dropout": {Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 5}, CuK: []int64{0, 5}, Dropout: 0.4, Seed: 5,
			Scale: 1},
		"block mask": {Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 5, 10}, CuK: []int64{0, 5, 10}, Mask: mask,
			QuerySeq: 5, KeySeq: 5, BlockRows: 2, BlockColumns: 3, Scale: 1},
		"all": {Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 4}, CuK: []int64{0, 5}, Mask: mask, QueryAt: 1 << 40,
			KeyAt: 5 << 33, QuerySeq: 5, KeySeq: 5, BlockRows: 2, BlockColumns: 3,
			Shift: []int64{2}, Window: &Window{Left: 4, Right: 3}, Sinks: []float64{0.7, -3},
			Slopes: []float64{0.5, -0.2}, Softcap: 3, Dropout: 0.3, Seed: -9, HeadAt: 11, Scale: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(2, uint64(len(name))))
			q, k, v := normal(r, a.Tq()*a.Hq*a.D), normal(r, a.Tk()*a.Hkv*a.D), normal(r, a.Tk()*a.Hkv*a.Dv)
			dout := normal(r, a.Tq()*a.Hq*a.Dv)
			loss := func() float64 { out, _ := AttentionForward(a, q, k, v); return dot(out, dout) }
			out, lse := AttentionForward(a, q, k, v)
			g := AttentionGradients(a, q, k, v, out, lse, dout)
			sameSlope(t, "dq", q, g.DQ, loss)
			sameSlope(t, "dk", k, g.DK, loss)
			sameSlope(t, "dv", v, g.DV, loss)
			sameSlope(t, "dsinks", a.Sinks, g.DSinks, loss)
			sameSlope(t, "dslopes", a.Slopes, g.DSlopes, loss)
		})
	}
}

// A softmax that is carried through calls with some keys each is the softmax over all keys, and the
// gradients of the calls add up to its gradients.
func TestAttentionCarry(t *testing.T) {
	whole := &Attention{Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 6}, CuK: []int64{0, 8}, Causal: true,
		Shift: []int64{1}, Scale: 1, Sinks: []float64{0.3, -1}, Slopes: []float64{0.5, 0.1}, Softcap: 2,
		Dropout: 0.3, Seed: 3}
	r := rand.New(rand.NewPCG(2, 77))
	q, k, v, dout := normal(r, 6*2*3), normal(r, 8*3), normal(r, 8*2), normal(r, 6*2*2)
	out, lse := AttentionForward(whole, q, k, v)
	want := AttentionGradients(whole, q, k, v, out, lse, dout)
	gotOut, gotLSE := make([]float64, len(out)), make([]float64, len(lse))
	for row := range gotLSE {
		gotLSE[row] = whole.Sinks[row%2]
	}
	at := func(k0, k1 int64) (a Attention) {
		a = *whole
		a.CuK, a.KeyAt, a.Shift = []int64{0, k1 - k0}, k0, []int64{1 - k0}
		return a
	}
	parts := [][2]int64{{5, 8}, {0, 2}, {2, 5}}
	for _, p := range parts {
		a := at(p[0], p[1])
		AttentionCarry(&a, q, k[p[0]*3:p[1]*3], v[p[0]*2:p[1]*2], gotOut, gotLSE)
	}
	near.Slice(t, "out", gotOut, out, 1e-13)
	near.Slice(t, "lse", gotLSE, lse, 1e-13)
	dq, dslopes := make([]float64, len(q)), make([]float64, 2)
	for _, p := range parts {
		a := at(p[0], p[1])
		g := AttentionGradients(&a, q, k[p[0]*3:p[1]*3], v[p[0]*2:p[1]*2], out, lse, dout)
		near.Slice(t, "dk", g.DK, want.DK[p[0]*3:p[1]*3], 1e-13)
		near.Slice(t, "dv", g.DV, want.DV[p[0]*2:p[1]*2], 1e-13)
		near.Slice(t, "dsinks", g.DSinks, want.DSinks, 1e-13)
		for i := range dq {
			dq[i] += g.DQ[i]
		}
		for i := range dslopes {
			dslopes[i] += g.DSlopes[i]
		}
	}
	near.Slice(t, "dq", dq, want.DQ, 1e-13)
	near.Slice(t, "dslopes", dslopes, want.DSlopes, 1e-13)
}
