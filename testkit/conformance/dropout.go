package conformance

import (
	"fmt"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testDropout(s *suite) {
	for i, shape := range [][2]int64{{1, 1}, {3, 65}, {70, 8}, {17, 1000}, {0, 5}, {300, 136}} {
		for j, l := range []layout{dense, padded} {
			s.typed(func(d tensor.DType, suffix string) {
				s.dropoutCase(d, suffix, shape[0], shape[1], []float64{0.1, 0, 0.75}[(i+j)%3], l)
			})
		}
	}
	s.dropoutRefusals()
}

// numbers are some tokens' numbers: neither consecutive nor small.
func numbers(tokens int64) []float64 {
	all := make([]float64, tokens)
	for t := range all {
		all[t] = float64(int64(t)*3 + int64(t%2)<<40)
	}
	return all
}

func (s *suite) dropoutCase(d tensor.DType, suffix string, tokens, n int64, p float64, l layout) {
	const seed = -7
	f := ref.Convert[float32, float64]
	random := seeded(41, tokens, n)
	x, was, at := normalAs(d, random, tokens*n), normalAs(d, random, tokens*n), numbers(tokens)
	ids := make([]int64, tokens)
	for t := range ids {
		ids[t] = int64(at[t])
	}
	for _, add := range []bool{false, true} {
		y := was
		if !add {
			y = nil
		}
		w := both("y", ref.Dropout(x, y, ids, n, p, seed), ref.Dropout(f(x), f(y), ids, n, p, seed)).as(d)
		name := fmt.Sprintf("[%d, %d] p %g add %v %v%s", tokens, n, p, add, l, suffix)
		s.check(name, []want{w}, func(b *bench) ([]*array, error) {
			out := b.inout("y", d, l, was, tokens, n)
			return []*array{out},
				b.dev.Dropout(b.stream, &device.Dropout{X: b.in("x", d, l, x, tokens, n).Tensor, Y: out.Tensor,
					Tokens: b.in("tokens", tensor.I64, dense, at, tokens).Tensor, P: p, Seed: seed, Add: add})
		})
	}
	w := both("x", ref.Dropout(x, nil, ids, n, p, seed), ref.Dropout(f(x), nil, ids, n, p, seed)).as(d)
	s.check(fmt.Sprintf("[%d, %d] in place %v%s", tokens, n, l, suffix), []want{w}, func(b *bench) ([]*array, error) {
		y := b.inout("x", d, l, x, tokens, n)
		return []*array{y},
			b.dev.Dropout(b.stream,
				&device.Dropout{X: y.Tensor, Y: y.Tensor, Tokens: b.in("tokens", tensor.I64, dense, at, tokens).Tensor,
					P: p, Seed: seed})
	})
}

func (s *suite) dropoutRefusals() {
	b := newBench(s.t, s.one)
	defer b.close()
	f := func(shape ...int64) tensor.Tensor {
		return b.inout("x", tensor.F32, dense, make([]float64, tensor.Of(nil, tensor.F32, shape...).Numel()),
			shape...).Tensor
	}
	ids := func(n int64) tensor.Tensor { return b.in("tokens", tensor.I64, dense, make([]float64, n), n).Tensor }
	for name, a := range map[string]device.Dropout{
		"another y":       {X: f(3, 4), Y: f(3, 5), Tokens: ids(3)},
		"too few tokens":  {X: f(3, 4), Y: f(3, 4), Tokens: ids(2)},
		"tokens in F32":   {X: f(3, 4), Y: f(3, 4), Tokens: f(3)},
		"probability 1":   {X: f(3, 4), Y: f(3, 4), Tokens: ids(3), P: 1},
		"probability < 0": {X: f(3, 4), Y: f(3, 4), Tokens: ids(3), P: -0.1},
	} {
		if err := b.settle(b.dev.Dropout(b.stream, &a)); status.Of(err) != status.InvalidArgument {
			s.t.Errorf("dropout with %s: %v", name, err)
		}
	}
}
