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
	for name, a := range map[string]*Attention{
		"full":           {Hq: 2, Hkv: 2, D: 3, Dv: 3, CuQ: []int64{0, 5}, CuK: []int64{0, 5}, Scale: 0.7},
		"causal":         {Hq: 4, Hkv: 2, D: 3, Dv: 2, CuQ: []int64{0, 5}, CuK: []int64{0, 5}, Causal: true, Scale: 0.7},
		"fewer keys":     {Hq: 1, Hkv: 1, D: 1, Dv: 3, CuQ: []int64{0, 5}, CuK: []int64{0, 3}, Causal: true, Scale: 1.3},
		"more keys":      {Hq: 1, Hkv: 1, D: 4, Dv: 1, CuQ: []int64{0, 2}, CuK: []int64{0, 5}, Causal: true, Scale: 0.5},
		"documents":      {Hq: 2, Hkv: 1, D: 2, Dv: 2, CuQ: []int64{0, 3, 3, 4, 7}, CuK: []int64{0, 3, 5, 6, 9}, Causal: true, Scale: 0.7},
		"window":         {Hq: 2, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 6}, CuK: []int64{0, 6}, Window: &Window{Left: 2, Right: 1}, Scale: 0.7},
		"causal window":  {Hq: 1, Hkv: 1, D: 3, Dv: 2, CuQ: []int64{0, 4, 9}, CuK: []int64{0, 6, 8}, Causal: true, Window: &Window{Left: 1, Right: -1}, Scale: 0.7},
		"uneven grouped": {Hq: 3, Hkv: 3, D: 2, Dv: 2, CuQ: []int64{0, 4}, CuK: []int64{0, 4}, KVHead: []int64{0, 0, 2}, Causal: true, Scale: 0.7},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(2, uint64(len(name))))
			q, k, v := normal(r, a.Tq()*a.Hq*a.D), normal(r, a.Tk()*a.Hkv*a.D), normal(r, a.Tk()*a.Hkv*a.Dv)
			dout := normal(r, a.Tq()*a.Hq*a.Dv)
			loss := func() float64 { out, _ := AttentionForward(a, q, k, v); return dot(out, dout) }
			out, lse := AttentionForward(a, q, k, v)
			dq, dk, dv := AttentionBackward(a, q, k, v, out, lse, dout)
			sameSlope(t, "dq", q, dq, loss)
			sameSlope(t, "dk", k, dk, loss)
			sameSlope(t, "dv", v, dv, loss)
		})
	}
}
