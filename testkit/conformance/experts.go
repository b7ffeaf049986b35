package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testExperts runs the cases of mixtures of experts.
func testExperts(s *suite) {
	for _, c := range []struct{ tokens, experts, k int64 }{{1, 1, 1}, {7, 4, 2}, {100, 8, 3}, {65, 17, 17},
		{33, 128, 8}, {0, 4, 2}, {3, 64, 1}, {900, 40, 4}} {
		for _, router := range routers(c.experts, c.k) {
			for _, biased := range []bool{false, true} {
				if biased && router.Groups > 1 && !router.Sigmoid {
					continue // refused
				}
				s.routeCase(c.tokens, c.experts, c.k, router, biased)
			}
		}
		for _, l := range []layout{dense, padded} {
			s.typed(func(d tensor.DType, suffix string) { s.rowsCase(d, suffix, c.tokens, c.experts, c.k, 21, 13, l) })
		}
	}
	// several tiles of each axis, and rows that begin at multiples of 16 bytes
	s.typed(func(d tensor.DType, suffix string) { s.rowsCase(d, suffix, 150, 3, 2, 200, 136, dense) })
	// more choices than a GPU sorts at a time, and more experts than a block of a GPU has threads
	s.routeCase(64, 64, 40, ref.Router{Normalize: true}, false)
	s.typed(func(d tensor.DType, suffix string) { s.rowsCase(d, suffix, 10, 300, 2, 9, 5, dense) })
	s.routeEqualLogits()
	s.routeUnlikely()
	s.routeGroups()
	s.expertRefusals()
	s.expertFaults()
}

// routers returns the forms of the choice of k among experts.
func routers(experts, k int64) []ref.Router {
	all := []ref.Router{{Normalize: true}, {}, {Normalize: true, Scale: 0.5}, {Sigmoid: true, Normalize: true},
		{Sigmoid: true, Scale: 0.5}}
	for _, groups := range []int64{2, 5, 8} {
		if kept := (groups + 1) / 2; experts%groups == 0 && experts >= 2*groups && k <= kept*experts/groups {
			all = append(all, ref.Router{Sigmoid: true, Normalize: true, Groups: groups, Kept: kept, Scale: 2.5},
				ref.Router{Groups: groups, Kept: kept, Scale: 16})
		}
	}
	return all
}

// route returns the reference's choices for random logits and, if biased, a random bias of the
// choice. Some experts get no tokens, and with many experts one gets all.
func route(tokens, experts, k int64, router ref.Router, biased bool) (logits, bias []float64, r ref.Routing[float64]) {
	logits = normal(seeded(31, tokens, experts, k), tokens*experts)
	unlikely := 30.0
	if router.Sigmoid { // beside 1, a weight of e^-30 would leave the reference few digits of the gradients
		unlikely = 9
	}
	for i := range logits {
		switch e := int64(i) % experts; {
		case experts > 16 && e == 5:
			logits[i] += 20
		case experts > k+1 && e == 1:
			logits[i] -= unlikely
		}
		logits[i] = float64(float32(logits[i]))
	}
	if biased {
		bias = rounded32(normal(seeded(35, tokens, experts, k), experts))
	}
	return logits, bias, ref.Route(experts, k, logits, bias, router)
}

func (s *suite) routeCase(tokens, experts, k int64, router ref.Router, biased bool) {
	const sequences = 3
	f := ref.Convert[float32, float64]
	logits, bias, r := route(tokens, experts, k, router, biased)
	r32 := ref.Route(experts, k, f(logits), narrow(bias), router)
	sequence, random := make([]float64, tokens), seeded(32, tokens)
	counts, sums := make([]float64, sequences*experts), make([]float64, sequences*experts)
	counts[0], sums[0] = 4, 0.5 // added to
	before := append([]float64(nil), counts...)
	sumsBefore := append([]float64(nil), sums...)
	for t := range sequence {
		sequence[t] = float64(random.IntN(sequences+1) - 1)
		if sequence[t] < 0 {
			continue
		}
		at := int64(sequence[t]) * experts
		for e := range experts {
			sums[at+e] += r.Probs[int64(t)*experts+e]
		}
		for _, e := range r.Experts[int64(t)*k : int64(t+1)*k] {
			counts[at+e]++
		}
	}
	name := fmt.Sprintf("route %d tokens to %d of %d, %+v, biased %v", tokens, k, experts, router, biased)
	wants := []want{both("probs", r.Probs, r32.Probs), {name: "experts", ref: floats(r.Experts), exact: true},
		{name: "rows", ref: floats(r.Rows), exact: true}, both("weights", r.Weights, r32.Weights),
		{name: "offsets", ref: floats(r.Offsets), exact: true}}
	run := func(b *bench, counted bool) ([]*array, *device.Route) {
		probs, chosen, rows := b.inout("logits", tensor.F32, padded, logits, tokens, experts),
			b.out("experts", tensor.I32, shifted, tokens, k), b.out("rows", tensor.I32, dense, tokens, k)
		weights, offsets := b.out("weights", tensor.F32, dense, tokens*k),
			b.out("offsets", tensor.I32, dense, experts+1)
		all := []*array{probs, chosen, rows, weights, offsets}
		a := &device.Route{Logits: probs.Tensor, Experts: chosen.Tensor, Rows: rows.Tensor, Weights: weights.Tensor,
			Offsets: offsets.Tensor, Normalize: router.Normalize, Sigmoid: router.Sigmoid, Groups: router.Groups,
			KeptGroups: router.Kept, WeightScale: router.Scale}
		if biased {
			a.Bias = b.in("bias", tensor.F32, dense, bias, experts).Tensor
		}
		if counted {
			n, p := b.inout("counts", tensor.F64, dense, before, sequences, experts),
				b.inout("sums", tensor.F64, dense, sumsBefore, sequences, experts)
			a.Sequence, a.Counts, a.Sums = b.in("sequence", tensor.I32, dense, sequence, tokens).Tensor,
				n.Tensor, p.Tensor
			all = append(all, n, p)
		}
		return all, a
	}
	s.check(name, wants, func(b *bench) ([]*array, error) {
		all, a := run(b, false)
		return all, b.dev.RouteForward(b.stream, a)
	})
	s.check(name+", counted",
		append(wants, want{name: "counts", ref: counts, exact: true}, want{name: "sums", ref: sums, bound: resolution}),
		func(b *bench) ([]*array, error) {
			all, a := run(b, true)
			return all, b.dev.RouteForward(b.stream, a)
		})

	// The reference gets the probabilities as the device has them: where one of them is nearly 1,
	// the gradient is proportional to its distance from 1.
	r.Probs, r.Weights = rounded32(r.Probs), rounded32(r.Weights)
	r32.Probs, r32.Weights = f(r.Probs), f(r.Weights)
	dweights, scale := normal(random, tokens*k), normal(random, sequences)
	scaled := make([]float64, tokens*experts)
	for t := range sequence {
		for e := range experts {
			if q := int64(sequence[t]); q >= 0 {
				scaled[int64(t)*experts+e] = scale[q] * counts[q*experts+e]
			}
		}
	}
	for _, balanced := range []bool{false, true} {
		if balanced && router.Sigmoid {
			continue
		}
		g := scaled
		if !balanced {
			g = nil
		}
		plain := ref.RouteGrad(&r32, experts, k, f(dweights), f(g), router)
		s.typed(func(d tensor.DType, suffix string) {
			w := both("dlogits", ref.RouteGrad(&r, experts, k, dweights, g, router), plain).as(d)
			s.check(fmt.Sprint(name, " backward, balanced ", balanced, suffix), []want{w},
				func(b *bench) ([]*array, error) {
					out := b.out("dlogits", d, padded, tokens, experts)
					a := &device.RouteGrad{Probs: b.in("probs", tensor.F32, padded, r.Probs, tokens, experts).Tensor,
						Experts:  b.in("experts", tensor.I32, dense, floats(r.Experts), tokens, k).Tensor,
						Rows:     b.in("rows", tensor.I32, shifted, floats(r.Rows), tokens, k).Tensor,
						Weights:  b.in("weights", tensor.F32, dense, r.Weights, tokens*k).Tensor,
						DWeights: b.in("dweights", tensor.F32, dense, dweights, tokens*k).Tensor, DLogits: out.Tensor,
						Normalize: router.Normalize, Sigmoid: router.Sigmoid, WeightScale: router.Scale}
					if balanced {
						a.Sequence, a.Counts = b.in("sequence", tensor.I32, dense, sequence, tokens).Tensor,
							b.in("counts", tensor.F64, dense, counts, sequences, experts).Tensor
						a.Scale = b.in("scale", tensor.F32, dense, scale, sequences).Tensor
					}
					return []*array{out}, b.dev.RouteBackward(b.stream, a)
				})
		})
	}
}

// Of equal logits, the lower expert is chosen first; 0 and -0 are equal. NaN is chosen last.
func (s *suite) routeEqualLogits() {
	nan, negative := math.NaN(), math.Copysign(0, -1)
	logits := []float64{1, 3, 3, 3, 0, 0, 0, 0, -1, 2, -1, 2, -1, negative, 0, -2, nan, 1, nan, 2}
	s.check("route equal logits", []want{{name: "experts",
		ref: []float64{1, 2, 3, 0, 1, 2, 1, 3, 0, 1, 2, 0, 3, 1, 0}, exact: true},
		{name: "offsets", ref: []float64{0, 4, 9, 12, 15}, exact: true}}, func(b *bench) ([]*array, error) {
		chosen, offsets := b.out("experts", tensor.I32, dense, 5, 3), b.out("offsets", tensor.I32, dense, 5)
		return []*array{chosen, offsets},
			b.dev.RouteForward(b.stream,
				&device.Route{Logits: b.inout("logits", tensor.F32, dense, logits, 5, 4).Tensor,
					Experts: chosen.Tensor, Rows: b.out("rows", tensor.I32, dense, 5, 3).Tensor,
					Weights: b.out("weights", tensor.F32, dense, 15).Tensor, Offsets: offsets.Tensor})
	})
}

// With a bias the chosen experts may have nearly no probability. Their weights are small, and not
// 0/0. Of equal sums of probability and bias, the lower expert is chosen first.
func (s *suite) routeUnlikely() {
	logits, bias := []float64{0, -29, -30, -31, -30}, []float64{-2, 0, 1, 0.5, 1}
	f := ref.Convert[float32, float64]
	r, r32 := ref.Route(5, 3, logits, bias, ref.Router{Normalize: true}),
		ref.Route(5, 3, f(logits), f(bias), ref.Router{Normalize: true})
	weights := both("weights", r.Weights, r32.Weights)
	weights.chain = 31 * ulp // the relative error of exp(x) is that of x times x
	s.check("route to experts without probability",
		[]want{{name: "experts", ref: []float64{2, 4, 3}, exact: true}, weights}, func(b *bench) ([]*array, error) {
			chosen, weights := b.out("experts", tensor.I32, dense, 1, 3), b.out("weights", tensor.F32, dense, 3)
			return []*array{chosen, weights},
				b.dev.RouteForward(b.stream,
					&device.Route{Logits: b.inout("logits", tensor.F32, dense, logits, 1, 5).Tensor,
						Bias: b.in("bias", tensor.F32, dense, bias, 5).Tensor, Experts: chosen.Tensor,
						Rows: b.out("rows", tensor.I32, dense, 1, 3).Tensor, Weights: weights.Tensor,
						Offsets:   b.out("offsets", tensor.I32, dense, 6).Tensor,
						Normalize: true})
		})
}

// A token chooses from the groups whose two best experts are best together, also if the bias is
// negative for all of them. Of equal groups the lower one is kept. NaN is chosen last.
func (s *suite) routeGroups() {
	nan := math.NaN()
	logits, bias := []float64{
		4, -9, -9, 1, 1.5, -9, -9, -9, // 4 is in the first group, which is third
		0, 0, 0, 0, 0, 0, 0, 0,
		nan, nan, 1, nan, -1, -2, nan, nan,
		2, 2, 3, -9, -9, -9, -9, -9, // two equal experts are the best of the first group
		-200, -200, -200, -200, -200, -200, -200, -200, // probabilities of 0
	}, []float64{-3, -3, -3, -2, -2, -3, -3, -3}
	wants := []want{{name: "experts", ref: []float64{4, 3, 2, 3, 4, 2, 4, 5, 0, 3, 2, 0, 3, 4, 2}, exact: true},
		{name: "weights of probabilities of 0", ref: []float64{0, 0, 0}, exact: true}}
	run := func(b *bench, from int64) (chosen, weights *array, err error) {
		tokens := int64(len(logits))/8 - from
		chosen, weights = b.out("experts", tensor.I32, dense, tokens, 3), b.out("weights", tensor.F32, dense, 3*tokens)
		return chosen, weights, b.dev.RouteForward(b.stream,
			&device.Route{Logits: b.inout("logits", tensor.F32, dense, logits[8*from:], tokens, 8).Tensor,
				Bias: b.in("bias", tensor.F32, dense, bias, 8).Tensor, Experts: chosen.Tensor,
				Rows: b.out("rows", tensor.I32, dense, tokens, 3).Tensor, Weights: weights.Tensor,
				Offsets: b.out("offsets", tensor.I32, dense, 9).Tensor, Normalize: true, Sigmoid: true,
				Groups: 4, KeptGroups: 2})
	}
	s.check("route in groups", wants, func(b *bench) ([]*array, error) {
		chosen, _, err := run(b, 0)
		if err != nil {
			return nil, err
		}
		_, weights, err := run(b, 4)
		return []*array{chosen, weights}, err
	})
}

// rowsCase tests the operations on the rows of a routing, with matrices [m, n].
func (s *suite) rowsCase(d tensor.DType, suffix string, tokens, experts, k, n, m int64, l layout) {
	f := ref.Convert[float32, float64]
	_, _, r := route(tokens, experts, k, ref.Router{Normalize: true}, false)
	random, rows := seeded(33, tokens, experts, k), tokens*k
	x, sorted, matrices := normalAs(d, random, tokens*n), normalAs(d, random, rows*n), normalAs(d, random, experts*n*m)
	grads, was := normalAs(d, random, rows*m), normal(random, experts*m*n)
	bias := normalAs(d, random, experts*m)
	index := func(b *bench) tensor.Tensor { return b.in("rows", tensor.I32, dense, floats(r.Rows), tokens, k).Tensor }
	offsets := func(b *bench) tensor.Tensor {
		return b.in("offsets", tensor.I32, dense, floats(r.Offsets), experts+1).Tensor
	}
	name := fmt.Sprintf("%d tokens to %d of %d, [%d, %d] %v%s", tokens, k, experts, m, n, l, suffix)

	spread := make([]float64, rows*n)
	for i, row := range r.Rows {
		copy(spread[row*n:(row+1)*n], x[int64(i)/k*n:])
	}
	s.check("spread "+name, []want{{name: "y", ref: spread, exact: true}}, func(b *bench) ([]*array, error) {
		y := b.out("y", d, l, rows, n)
		return []*array{y},
			b.dev.SpreadRows(b.stream,
				&device.SpreadRows{X: b.in("x", d, l, x, tokens, n).Tensor, Rows: index(b), Y: y.Tensor})
	})
	ownWeights := normal(random, tokens)
	for _, c := range []struct {
		name                     string
		weights, own, ownWeights []float64
	}{{"weighted", r.Weights, nil, nil}, {"not weighted", nil, nil, nil}, {"with own rows", nil, x, nil},
		{"with weighted own rows", r.Weights, x, ownWeights}} {
		w := both("y", ref.CombineRows(n, k, sorted, r.Rows, rounded32(c.weights), c.own, rounded32(c.ownWeights)),
			ref.CombineRows(n, k, f(sorted), r.Rows, narrow(c.weights), narrow(c.own), narrow(c.ownWeights))).as(d)
		w.chain = float64(k+1) * ulp
		s.check(fmt.Sprint("combine ", name, ", ", c.name), []want{w}, func(b *bench) ([]*array, error) {
			y := b.out("y", d, l, tokens, n)
			a := &device.CombineRows{X: b.in("x", d, l, sorted, rows, n).Tensor, Rows: index(b), Y: y.Tensor}
			if c.weights != nil {
				a.Weights = b.in("weights", tensor.F32, dense, c.weights, rows).Tensor
			}
			if c.own != nil {
				a.Own = b.in("own", d, l, c.own, tokens, n).Tensor
			}
			if c.ownWeights != nil {
				a.OwnWeights = b.in("own weights", tensor.F32, dense, c.ownWeights, tokens).Tensor
			}
			return []*array{y}, b.dev.CombineRows(b.stream, a)
		})
	}

	product, product32 := make([]float64, rows*m), make([]float32, rows*m)
	biased, biased32 := make([]float64, rows*m), make([]float32, rows*m)
	sums, sums32 := append([]float64(nil), was...), f(was)
	for e := range experts {
		for row := r.Offsets[e]; row < r.Offsets[e+1]; row++ {
			for j := range m {
				at := row*m + j
				for i := range n {
					product[at] += sorted[row*n+i] * matrices[(e*m+j)*n+i]
					product32[at] += float32(sorted[row*n+i]) * float32(matrices[(e*m+j)*n+i])
					sums[(e*m+j)*n+i] += grads[at] * sorted[row*n+i]
					sums32[(e*m+j)*n+i] += float32(grads[at]) * float32(sorted[row*n+i])
				}
				biased[at], biased32[at] = product[at]+bias[e*m+j], product32[at]+float32(bias[e*m+j])
			}
		}
	}
	w, withBias := both("c", product, product32).as(d), both("c", biased, biased32).as(d)
	w.chain, withBias.chain = float64(n)*ulp, float64(n+1)*ulp
	for _, transposed := range []bool{true, false} { // B as [E, M, N], and as [E, N, M]
		b0, shape := matrices, []int64{experts, m, n}
		if !transposed {
			b0, shape = make([]float64, len(matrices)), []int64{experts, n, m}
			for i := range b0 {
				e, row, column := int64(i)/(n*m), int64(i)/m%n, int64(i)%m
				b0[i] = matrices[(e*m+column)*n+row]
			}
		}
		s.check(fmt.Sprint("grouped gemm ", name, ", transposed ", transposed), []want{w},
			func(b *bench) ([]*array, error) {
				c, matrix := b.out("c", d, l, rows, m), b.in("b", d, l, b0, shape...).Tensor
				if transposed {
					matrix = matrix.Permute(0, 2, 1)
				}
				return []*array{c},
					b.dev.GroupedGemm(b.stream,
						&device.GroupedGemm{A: b.in("a", d, l, sorted, rows, n).Tensor, B: matrix, C: c.Tensor,
							Offsets: offsets(b)})
			})
		s.check(fmt.Sprint("grouped gemm with a bias ", name, ", transposed ", transposed), []want{withBias},
			func(b *bench) ([]*array, error) {
				c, matrix := b.out("c", d, l, rows, m), b.in("b", d, l, b0, shape...).Tensor
				if transposed {
					matrix = matrix.Permute(0, 2, 1)
				}
				return []*array{c},
					b.dev.GroupedGemm(b.stream,
						&device.GroupedGemm{A: b.in("a", d, l, sorted, rows, n).Tensor, B: matrix,
							Bias: b.in("bias", d, l, bias, experts, m).Tensor, C: c.Tensor, Offsets: offsets(b)})
			})
	}
	w = both("c", sums, sums32)
	w.chain = float64(rows+8) * ulp
	s.check("grouped gemm of weights "+name, []want{w}, func(b *bench) ([]*array, error) {
		c := b.inout("c", tensor.F32, l, was, experts, m, n)
		return []*array{c},
			b.dev.GroupedGemmWeights(b.stream,
				&device.GroupedGemmWeights{A: b.in("a", d, l, grads, rows, m).Tensor,
					B: b.in("b", d, l, sorted, rows, n).Tensor, C: c.Tensor, Offsets: offsets(b)})
	})
	for form := range swigluForms {
		s.weightedSwiGLUCase(d, name, rows, n, l, form)
	}
}

// narrow returns x in F32; nil for nil.
func narrow(x []float64) []float32 {
	if x == nil {
		return nil
	}
	return ref.Convert[float32](x)
}

// rounded32 returns x as the device has it, in F32; nil for nil.
func rounded32(x []float64) []float64 {
	if x == nil {
		return nil
	}
	return ref.Convert[float64](narrow(x))
}

func (s *suite) weightedSwiGLUCase(d tensor.DType, name string, rows, n int64, l layout, form int) {
	gelu, clamped := swigluForms[form][0], swigluForms[form][1]
	random := seeded(34, rows, n)
	gate, up, dy, weights := normalAs(d, random, rows*n), normalAs(d, random, rows*n), normalAs(d, random, rows*n),
		normal(random, rows)
	if clamped {
		atLimits(gate, up)
	}
	dgate, dup, y, dweights := weightedSwiGLU(gate, up, dy, weights, n, gelu, clamped)
	f := ref.Convert[float32, float64]
	dgate32, dup32, y32, dweights32 := weightedSwiGLU(f(gate), f(up), f(dy), f(weights), n, gelu, clamped)
	wants := []want{both("dgate", dgate, dgate32).as(d), both("dup", dup, dup32).as(d),
		both("dweights", dweights, dweights32)}
	wants[2].chain = float64(n) * ulp
	for _, restore := range []bool{false, true} {
		if restore {
			wants = append(wants, both("dy", y, y32).as(d))
		}
		s.check(fmt.Sprint("weighted swiglu ", name, ", form ", form, ", restore ", restore), wants,
			func(b *bench) ([]*array, error) {
				dg, du, out := b.inout("gate", d, l, gate, rows, n), b.inout("up", d, l, up, rows, n),
					b.out("dweights", tensor.F32, dense, rows)
				all := []*array{dg, du, out}
				a := &device.WeightedSwiGLUGrad{Gate: dg.Tensor, Up: du.Tensor, DGate: dg.Tensor, DUp: du.Tensor,
					DWeights: out.Tensor, Restore: restore, GELU: gelu, Clamped: clamped,
					Weights: b.in("weights", tensor.F32, dense, weights, rows).Tensor}
				if restore {
					x := b.inout("dy", d, l, dy, rows, n)
					a.DY, all = x.Tensor, append(all, x)
				} else {
					a.DY = b.in("dy", d, l, dy, rows, n).Tensor
				}
				return all, b.dev.WeightedSwiGLUBackward(b.stream, a)
			})
	}
}

// weightedSwiGLU returns the gradients of weights·SwiGLU for the gradient dy, and weights·y.
func weightedSwiGLU[T ref.Float](gate, up, dy, weights []T, n int64, gelu, clamped bool) (dgate, dup, y, dweights []T) {
	weighted, form := make([]T, len(dy)), ref.SwiGLUForm[T](gelu, clamped)
	for i := range dy {
		weighted[i] = weights[int64(i)/n] * dy[i]
	}
	y, dweights = form.Gate(gate, up), make([]T, len(weights))
	dgate, dup = form.Grad(gate, up, weighted)
	for i := range y {
		dweights[int64(i)/n] += dy[i] * y[i]
		y[i] *= weights[int64(i)/n]
	}
	return dgate, dup, y, dweights
}
