package conformance

import (
	"fmt"
	"math"
	"slices"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testDeltaStates tests states that are passed between parts of a document, as between ranks. The
// keys have so many features that the transition matrix is not a small difference of large numbers.
// The cases of a divided document test long parts.
func testDeltaStates(s *suite) {
	for i, c := range []deltaCase{
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 1, Dv: 1, Cu: one(5)}},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 16, Cu: one(1), L2Norm: true}},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 16, Cu: one(0), L2Norm: true}},
		{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 6, Dk: 12, Dv: 20, Cu: one(16), L2Norm: true}},
		{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 20, Dv: 12, Cu: one(133)}, chunk: 16, panel: 48},
		{GatedDelta: ref.GatedDelta{Hk: 4, Hv: 3, Dk: 48, Dv: 16, Cu: one(65), KeyHead: []int64{1, 1, 3}, L2Norm: true},
			chunk: 64},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 100, Dv: 5, Cu: one(64), L2Norm: true}, decay: 2},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 33, Dv: 17, Cu: one(130), L2Norm: true}, decay: 4},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 64, Cu: one(70), L2Norm: true}, decay: 1, beta: 2},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 16, Cu: one(70), L2Norm: true}, decay: 3},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 16, Cu: one(40)}, beta: 1},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 128, Dv: 128, Cu: one(66), L2Norm: true}},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 0, Dk: 16, Dv: 16, Cu: one(9), KeyHead: []int64{}}},
	} {
		c.Scale = 0.7
		l := []deltaLayouts{{headMajor, padded, headMajor}, {dense, dense, padded}, {padded, headMajor, dense},
			{shifted, shifted, shifted}}[i%4]
		s.typed(func(d tensor.DType, suffix string) { s.stateCase(d, suffix, &c, l) })
	}
	for i, n := range [][3]int64{{1, 1, 1}, {2, 5, 3}, {3, 16, 16}, {1, 100, 33}, {2, 64, 128}, {1, 128, 64}, {0, 4, 4},
		{2, 17, 1}} {
		s.foldCase(n[0], n[1], n[2], i%2 == 0)
	}
	// at, of
	for i, cut := range [][2]int64{{40, 70}, {1, 65}, {65, 66}, {0, 20}, {20, 20}, {32, 96}} {
		for _, decay := range []int{0, 4} {
			c := &deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: []int64{16, 64, 5}[i%3],
				Dv: []int64{16, 33}[i%2], L2Norm: true, Cu: one(cut[1]), In: 1, Out: 1, Scale: 0.7}, decay: decay}
			if i == 1 {
				c.Hk, c.Hv, c.KeyHead, c.L2Norm = 3, 3, []int64{0, 0, 2}, false
			}
			s.typed(func(d tensor.DType, suffix string) { s.dividedCase(d, suffix, c, cut[0]) })
		}
	}
}

func (s *suite) stateCase(d tensor.DType, suffix string, c *deltaCase, l deltaLayouts) {
	x := newDeltaInput(d, c, seeded(51, c.T(), c.Hv, c.Dk, c.Dv))
	g, n := &c.GatedDelta, c.T()
	state, transition := ref.DeltaState(g, x.k, x.v, x.g, x.beta)
	// the unit matrix, before terms are subtracted from it
	decayed := make([]float64, len(transition))
	for i, m := range transition {
		transition[i] = float64(float32(m)) // beyond F32 a product of decays is 0
		if at := int64(i); at/c.Dk%c.Dk == at%c.Dk {
			decayed[i] = math.Exp(ref.Sum(columns(x.g, c.Hv, at/c.Dk/c.Dk, 1)))
		}
	}
	dstate := ref.DeltaStateGrad(g, x.q, x.k, x.g, x.beta, x.dout)
	refs := [][]float64{state, transition, dstate}
	plain := c.plain(d, refs, []int{1, 0, 1}, func(g *ref.GatedDelta, by float32) [][]float32 {
		q, k, decay, beta := times(1, x.q), times(1, x.k), times(1, x.g), times(1, x.beta)
		state, transition := ref.DeltaState(g, k, times(by, x.v), decay, beta)
		return [][]float32{state, transition, ref.DeltaStateGrad(g, q, k, decay, beta, times(by, x.dout))}
	})
	at := func(i int, name string) want {
		return want{name: name, ref: refs[i], plain: plain[i], rounds: d == tensor.BF16, chain: deltaChain}
	}
	wants := []want{at(0, "state"), at(1, "transition")}
	if by := growth(decayed, transition); d == tensor.BF16 {
		wants[1].chain, wants[1].gate = resolutionBF16*by, largestBF16*by
	} else {
		wants[1].chain *= by
	}
	for _, whole := range []bool{true, false} { // or without the transition
		results := 1
		if whole {
			results = 2
		}
		s.check(fmt.Sprint(c, suffix, ", transition ", whole), wants[:results], func(b *bench) ([]*array, error) {
			a := b.deltaArgs(c, x, l, false)
			state := b.out("state", tensor.F32, dense, c.Hv, c.Dk, c.Dv)
			y := &device.DeltaState{K: a.K, V: a.V, G: a.G, Beta: a.Beta, KeyHead: a.KeyHead, L2Norm: a.L2Norm,
				Chunk: a.Chunk, Panel: a.Panel, State: state.Tensor,
				Workspace: b.out("workspace", tensor.U8, dense, b.dev.GatedDeltaSizes(a).State).Tensor}
			if !whole {
				return []*array{state}, b.dev.DeltaState(b.stream, y)
			}
			transition := b.out("transition", tensor.F32, dense, c.Hv, c.Dk, c.Dk)
			y.Transition = transition.Tensor
			return []*array{state, transition}, b.dev.DeltaState(b.stream, y)
		})
	}
	s.check(fmt.Sprint(c, suffix, ", gradient"), []want{at(2, "dstate")}, func(b *bench) ([]*array, error) {
		a := b.deltaArgs(c, x, l, false)
		dstate := b.out("dstate", tensor.F32, dense, c.Hv, c.Dk, c.Dv)
		return []*array{dstate},
			b.dev.DeltaStateGrad(b.stream, &device.DeltaStateGrad{Q: a.Q, K: a.K, G: a.G, Beta: a.Beta,
				DOut: b.in("dout", d, l.v, x.dout, n, c.Hv, c.Dv).Tensor, KeyHead: a.KeyHead, L2Norm: a.L2Norm,
				Scale: a.Scale, Chunk: a.Chunk, Panel: a.Panel, DState: dstate.Tensor,
				Workspace: b.out("workspace", tensor.U8, dense, b.dev.GatedDeltaSizes(a).State).Tensor})
	})
}

// foldCase writes y to memory of its own, and over e.
func (s *suite) foldCase(heads, k, n int64, nan bool) {
	r := seeded(52, heads, k, n)
	m, x, e := normal(r, heads*k*k), normal(r, heads*k*n), normal(r, heads*k*n)
	if nan && heads > 1 {
		m[1], x[k*n], e[2] = math.NaN(), math.NaN(), math.NaN()
	}
	f := ref.Convert[float32, float64]
	for _, transpose := range []bool{false, true} {
		with := []want{both("y", ref.DeltaFold(heads, k, n, m, x, e, transpose),
			ref.DeltaFold(heads, k, n, f(m), f(x), f(e), transpose))}
		without := []want{both("y", ref.DeltaFold(heads, k, n, m, x, nil, transpose),
			ref.DeltaFold(heads, k, n, f(m), f(x), nil, transpose))}
		name := fmt.Sprintf("fold of %d heads, %dx%d, transpose %v", heads, k, n, transpose)
		run := func(b *bench, e tensor.Tensor, y *array) ([]*array, error) {
			return []*array{y},
				b.dev.DeltaFold(b.stream, &device.DeltaFold{M: b.in("m", tensor.F32, dense, m, heads, k, k).Tensor,
					X: b.in("x", tensor.F32, shifted, x, heads, k, n).Tensor, E: e, Y: y.Tensor, Transpose: transpose})
		}
		s.check(name, with, func(b *bench) ([]*array, error) {
			return run(b, b.in("e", tensor.F32, dense, e, heads, k, n).Tensor,
				b.out("y", tensor.F32, shifted, heads, k, n))
		})
		s.check(name+", over e", with, func(b *bench) ([]*array, error) {
			y := b.inout("e", tensor.F32, dense, e, heads, k, n)
			return run(b, y.Tensor, y)
		})
		s.check(name+" alone", without, func(b *bench) ([]*array, error) {
			return run(b, tensor.Tensor{}, b.out("y", tensor.F32, dense, heads, k, n))
		})
	}
}

// dividedCase divides one document at a token, as ranks do. The map of the first half gives the
// state before the second half, and the map of the second half gives the gradient of the state
// after the first half. The results are the results of the whole document.
func (s *suite) dividedCase(d tensor.DType, suffix string, c *deltaCase, at int64) {
	x := newDeltaInput(d, c, seeded(53, c.T(), c.Hv, c.Dk, c.Dv))
	name := fmt.Sprint(c, suffix, ", cut at ", at)
	wants := slices.Clone(deltaWant(name, c, x))
	for i := range wants { // there are more roundings than in a plain implementation of the whole
		wants[i].plain = nil
	}
	s.check(name, wants, func(b *bench) ([]*array, error) { return b.divided(c, x, at) })
}

func (b *bench) divided(c *deltaCase, x deltaInput, at int64) ([]*array, error) {
	l := deltaLayouts{headMajor, padded, headMajor}
	a := b.deltaArgs(c, x, l, false)
	out, y, results := b.deltaGrad(a, c, x, l)
	first, second := half(*y, 0, at), half(*y, at, c.T())
	states := func(name string) tensor.Tensor { return b.out(name, tensor.F32, dense, c.Hv, c.Dk, c.Dv).Tensor }
	list := func(t tensor.Tensor) tensor.Tensor { return t.View(1, c.Hv, c.Dk, c.Dv) }
	between, dbetween := states("state between"), states("dstate between")
	first.DStateIn, first.DStateOut, first.StateOut = y.DStateIn, list(dbetween), tensor.Tensor{}
	second.StateIn, second.DStateOut, second.DStateIn = list(between), y.DStateOut, tensor.Tensor{}

	var err error
	try := func(e error) {
		if err == nil {
			err = e
		}
	}
	scratch := func(bytes int64) tensor.Tensor { return b.out("workspace", tensor.U8, dense, bytes).Tensor }
	summary := func(y *device.GatedDeltaGrad) (state, transition tensor.Tensor) {
		state, transition = states("state of a half"), b.out("transition", tensor.F32, dense, c.Hv, c.Dk, c.Dk).Tensor
		try(b.dev.DeltaState(b.stream,
			&device.DeltaState{K: y.K, V: y.V, G: y.G, Beta: y.Beta, KeyHead: y.KeyHead, L2Norm: y.L2Norm,
				Chunk: y.Chunk, Panel: y.Panel, State: state, Transition: transition,
				Workspace: scratch(b.dev.GatedDeltaSizes(&y.GatedDelta).State)}))
		return state, transition
	}
	state, transition := summary(&first)
	try(b.dev.DeltaFold(b.stream, &device.DeltaFold{M: transition, X: a.StateIn.Select(0, 0), E: state, Y: between}))
	dstate := states("dstate of a half")
	try(b.dev.DeltaStateGrad(b.stream,
		&device.DeltaStateGrad{Q: second.Q, K: second.K, G: second.G, Beta: second.Beta, DOut: second.DOut,
			KeyHead: second.KeyHead, L2Norm: second.L2Norm, Scale: second.Scale, Chunk: second.Chunk,
			Panel: second.Panel, DState: dstate,
			Workspace: scratch(b.dev.GatedDeltaSizes(&second.GatedDelta).State)}))
	_, transition = summary(&second)
	try(b.dev.DeltaFold(b.stream, &device.DeltaFold{M: transition, X: y.DStateOut.Select(0, 0), E: dstate, Y: dbetween,
		Transpose: true}))
	for _, y := range []*device.GatedDeltaGrad{&first, &second} {
		sizes := b.dev.GatedDeltaSizes(&y.GatedDelta)
		y.Saved, y.Workspace = b.out("saved", tensor.U8, dense, sizes.Saved).Tensor,
			scratch(max(sizes.Forward, sizes.Backward))
		try(b.dev.GatedDeltaForward(b.stream, &y.GatedDelta))
		try(b.dev.GatedDeltaBackward(b.stream, y))
	}
	return append(out, results...), err
}

// half returns the arguments of a call on the tokens [lo, hi) of another call, as one document.
func half(y device.GatedDeltaGrad, lo, hi int64) device.GatedDeltaGrad {
	for _, t := range []*tensor.Tensor{&y.Q, &y.K, &y.V, &y.Out, &y.G, &y.Beta, &y.DOut, &y.DQ, &y.DK, &y.DV, &y.DG,
		&y.DBeta} {
		*t = t.Slice(0, lo, hi)
	}
	y.Cu = one(hi - lo)
	return y
}
