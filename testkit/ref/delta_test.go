package ref

import (
	"math"
	"math/rand/v2"
	"testing"
)

func bounds(lengths ...int64) []int64 {
	cu := []int64{0}
	for _, n := range lengths {
		cu = append(cu, cu[len(cu)-1]+n)
	}
	return cu
}

// decays returns logarithms of decays, and betas in [0, 1).
func decays(r *rand.Rand, n int64) (g, beta []float64) {
	g, beta = normal(r, n), make([]float64, n)
	for i := range g {
		g[i], beta[i] = -math.Abs(g[i]), r.Float64()
	}
	return g, beta
}

func TestGatedDeltaGradient(t *testing.T) {
	for name, a := range map[string]*GatedDelta{
		"plain":     {Hk: 1, Hv: 1, Dk: 3, Dv: 2, Cu: bounds(5), Scale: 0.6},
		"one token": {Hk: 1, Hv: 1, Dk: 2, Dv: 3, Cu: bounds(1), Scale: 0.6, L2Norm: true},
		"grouped":   {Hk: 2, Hv: 4, Dk: 2, Dv: 3, Cu: bounds(4), Scale: 1.3, L2Norm: true, In: 1, Out: 1},
		"key heads": {Hk: 2, Hv: 3, Dk: 2, Dv: 1, Cu: bounds(4), KeyHead: []int64{0, 0, 1}, Scale: 0.6},
		"documents": {Hk: 1, Hv: 2, Dk: 2, Dv: 2, Cu: bounds(2, 0, 1, 3), Scale: 0.6, L2Norm: true, In: 2, Out: 3},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, uint64(len(name))))
			n, square := a.T(), a.Hv*a.Dk*a.Dv
			q, k, v := normal(r, n*a.Hk*a.Dk), normal(r, n*a.Hk*a.Dk), normal(r, n*a.Hv*a.Dv)
			g, beta := decays(r, n*a.Hv)
			in, dout, dlast := normal(r, a.In*square), normal(r, n*a.Hv*a.Dv), normal(r, a.Out*square)
			loss := func() float64 {
				out, last := GatedDeltaForward(a, q, k, v, g, beta, in)
				return dot(out, dout) + dot(last, dlast)
			}
			d := GatedDeltaBackward(a, q, k, v, g, beta, in, dout, dlast)
			sameSlope(t, "dq", q, KeySum(a, d.DQ), loss)
			sameSlope(t, "dk", k, KeySum(a, d.DK), loss)
			sameSlope(t, "dv", v, d.DV, loss)
			sameSlope(t, "dg", g, d.DG, loss)
			sameSlope(t, "dbeta", beta, d.DBeta, loss)
			sameSlope(t, "dstate", in, d.DState, loss)
		})
	}
}

// The map of a range of tokens gives the same state, and the same gradient, as its tokens.
func TestDeltaState(t *testing.T) {
	a := &GatedDelta{Hk: 1, Hv: 2, Dk: 3, Dv: 2, Cu: bounds(7), Scale: 0.6, L2Norm: true, In: 1, Out: 1}
	r := rand.New(rand.NewPCG(3, 100))
	q, k, v := normal(r, 7*3), normal(r, 7*3), normal(r, 7*2*2)
	g, beta := decays(r, 7*2)
	in, dout, dlast := normal(r, 2*3*2), normal(r, 7*2*2), normal(r, 2*3*2)
	_, last := GatedDeltaForward(a, q, k, v, g, beta, in)
	state, transition := DeltaState(a, k, v, g, beta)
	each(t, "state", DeltaFold(2, 3, 2, transition, in, state, false), last, 1e-12)
	d := GatedDeltaBackward(a, q, k, v, g, beta, in, dout, dlast)
	dstate := DeltaStateGrad(a, q, k, g, beta, dout)
	each(t, "dstate", DeltaFold(2, 3, 2, transition, dlast, dstate, true), d.DState, 1e-12)
	each(t, "fold", DeltaFold(1, 2, 1, []float64{1, 2, 3, 4}, []float64{5, 6}, nil, true), []float64{23, 34}, 0)
}

func TestConv1dGradient(t *testing.T) {
	for width := int64(1); width <= 4; width++ {
		for _, cu := range [][]int64{bounds(6), bounds(1, 4), bounds(0, 2, 0, 3)} {
			a := &Conv1d{C: 2, Width: width, Cu: cu}
			r := rand.New(rand.NewPCG(4, uint64(width)))
			n := a.T() * a.C
			x, w, before, dy, dw := normal(r, n), normal(r, a.C*width), normal(r, (width-1)*a.C), normal(r, n),
				make([]float64, a.C*width)
			loss := func() float64 { return dot(Conv1dForward(a, x, w, before), dy) }
			dx, dbefore := Conv1dBackward(a, x, w, before, dy, dw)
			sameSlope(t, "dx", x, dx, loss)
			sameSlope(t, "dw", w, dw, loss)
			sameSlope(t, "dbefore", before, dbefore, loss)
			clear(before)
			each(t, "nothing before", Conv1dForward(a, x, w, nil), Conv1dForward(a, x, w, before), 0)
		}
	}
}

func TestGatesGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 1))
	const tokens, heads = 4, 3
	a, b, alog, bias := normal(r, tokens*heads), normal(r, tokens*heads), normal(r, heads), normal(r, heads)
	a[4], a[5] = 30, -30
	dg, dbeta, dalog, dbias := normal(r, tokens*heads), normal(r, tokens*heads), make([]float64, heads),
		make([]float64, heads)
	loss := func() float64 { g, beta := DeltaGates(a, b, alog, bias); return dot(g, dg) + dot(beta, dbeta) }
	da, db := DeltaGatesGrad(a, b, alog, bias, dg, dbeta, dalog, dbias)
	sameSlope(t, "da", a, da, loss)
	sameSlope(t, "db", b, db, loss)
	sameSlope(t, "dalog", alog, dalog, loss)
	sameSlope(t, "dbias", bias, dbias, loss)
}

func TestGatedNormGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 2))
	const rows, n, eps = 3, 5, 0.01
	x, gate, w, dy, dw := normal(r, rows*n), normal(r, rows*n), normal(r, n), normal(r, rows*n), make([]float64, n)
	loss := func() float64 { y, _ := GatedRMSNorm(n, x, gate, w, eps); return dot(y, dy) }
	_, rstd := GatedRMSNorm(n, x, gate, w, eps)
	dx, dgate := GatedRMSNormGrad(n, x, gate, w, rstd, dy, dw)
	sameSlope(t, "dx", x, dx, loss)
	sameSlope(t, "dgate", gate, dgate, loss)
	sameSlope(t, "dw", w, dw, loss)
}

func TestSigmoidGateGradient(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 3))
	x, gate, dy := normal(r, 20), normal(r, 20), normal(r, 20)
	loss := func() float64 { return dot(SigmoidGate(x, gate), dy) }
	dx, dgate := SigmoidGateGrad(x, gate, dy)
	sameSlope(t, "dx", x, dx, loss)
	sameSlope(t, "dgate", gate, dgate, loss)
}

// The expected values are from torch_recurrent_gated_delta_rule of transformers 5.23, in float32.
func TestGatedDeltaKnown(t *testing.T) {
	q, k := []float64{0.1, -0.4, 0.7, 0.2, -0.3, 0.5}, []float64{0.3, 0.5, -0.2, 0.9, 0.8, -0.1}
	v, g, beta := []float64{1, -2, 0.5, 0.25, -1, 3}, []float64{-0.5, -0.1, -2}, []float64{0.9, 0.3, 1}
	for _, c := range []struct {
		norm      bool
		out, last []float64
	}{
		{false, []float64{-0.248290241, 0.123333015, 0.250288963, -0.48581785, 0.239336282, -0.629016817},
			[]float64{-0.777839899, 2.35351348, 0.210241273, -0.367020041}},
		{true, []float64{-0.601346254, 0.680516124, 0.342032611, -1.01637483, 0.496859819, -1.38399935},
			[]float64{-0.978757679, 2.96002698, 0.232188791, -0.506537437}},
	} {
		a := &GatedDelta{Hk: 1, Hv: 1, Dk: 2, Dv: 2, Cu: bounds(3), L2Norm: c.norm, Scale: math.Sqrt(0.5),
			In: 1, Out: 1}
		out, last := GatedDeltaForward(a, q, k, v, g, beta, []float64{0.2, -0.6, 1.1, 0.4})
		each(t, "out", out, c.out, 2e-6)
		each(t, "last", last, c.last, 2e-6)
	}
}

// The expected values are from silu of conv1d of PyTorch 2.15 in float64.
func TestConv1dKnown(t *testing.T) {
	a := &Conv1d{C: 2, Width: 3, Cu: bounds(3)}
	y := Conv1dForward(a, []float64{1, -2, 0.5, 0.25, -1, 3}, []float64{0.1, 0.2, 0.3, -0.4, 0.5, -0.6}, nil)
	each(t, "y", y, []float64{0.172332755043, 0.922229740199, 0.205316152621, -0.276562445509, -0.0475020812521,
		-0.257438100643}, 1e-11)
}

func TestGatesKnown(t *testing.T) {
	g, beta := DeltaGates([]float64{0, 25, -800}, []float64{0, math.Log(3), 0}, []float64{math.Log(2), 0, 0},
		[]float64{0, 5, 0})
	each(t, "g", g, []float64{-2 * math.Ln2, -30, 0}, 1e-15)
	each(t, "beta", beta, []float64{0.5, 0.75, 0.5}, 1e-15)
}
