package conformance

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testCrossEntropy(s *suite) {
	for _, c := range []struct {
		rows, vocab int64
		spread      float64
	}{
		{1, 1, 1}, {3, 2, 1}, {7, 3, 5}, {17, 17, 1}, {2, 63, 30}, {65, 64, 3}, {3, 65, 1}, {100, 100, 100},
		{7, 257, 10},
		{0, 5, 1}, {5, 5000, 4}, {3, 33333, 0.01}, {9, 2500, 2}, {4, 2500, 100},
	} {
		s.typed(func(d tensor.DType, suffix string) {
			for _, softcap := range []float64{0, 30} {
				s.crossEntropyCase(d, suffix, c.rows, c.vocab, c.spread, softcap, false, dense, padded)
			}
		})
	}
	s.typed(func(d tensor.DType, suffix string) { s.crossEntropyCase(d, suffix, 3, 100, 2, 0, true, dense, padded) })
	s.typed(func(d tensor.DType, suffix string) { s.crossEntropyCase(d, suffix, 3, 100, 2, 5, true, dense, padded) })
}

// crossEntropyCase tests logits in F32 with gradients of type d, and logits of type d.
func (s *suite) crossEntropyCase(d tensor.DType, suffix string, rows, vocab int64, spread, softcap float64, nan bool,
	layouts ...layout) {
	s.crossEntropyOf(tensor.F32, d, suffix, rows, vocab, spread, softcap, nan, layouts...)
	// Two capped logits near the cap differ by a few units in the last place of the cap. That is
	// more than the limit where the plain form happens to be exact.
	if d != tensor.F32 && s.one.Info().LogitsBF16 && !(softcap > 0 && vocab < 3) {
		s.crossEntropyOf(d, d, suffix+" logits", rows, vocab, spread, softcap, nan, layouts...)
	}
}

func (s *suite) crossEntropyOf(from, d tensor.DType, suffix string, rows, vocab int64, spread, softcap float64,
	nan bool, layouts ...layout) {
	const scale = 1.0 / 7
	r := seeded(14, rows, vocab)
	logits, targets := normal(r, rows*vocab), integers(r, rows, vocab)
	for i := range logits {
		if logits[i] = float64(float32(logits[i]*spread + 20)); from == tensor.BF16 {
			logits[i] = float64(tensor.BF16ToF32(tensor.F32ToBF16(float32(logits[i]))))
		}
	}
	for i := range targets {
		if i%4 == 2 {
			targets[i] = ref.Ignored
		}
	}
	if nan { // row 1; the ignored row 2 stays zero whatever its logits are
		logits[vocab+vocab-1], logits[2*vocab] = math.NaN(), math.NaN()
	}
	f := ref.Convert[float32, float64]
	nll, g := ref.CrossEntropy(vocab, logits, targets, scale)
	nll32, g32 := ref.CrossEntropy(vocab, f(logits), targets, scale)
	if softcap > 0 {
		suffix += fmt.Sprintf(" softcap %v", softcap)
		nll, g = ref.CappedCrossEntropy(vocab, logits, targets, scale, softcap)
		nll32, g32 = ref.CappedCrossEntropy(vocab, f(logits), targets, scale, softcap)
	}
	wants := []want{both("nll", nll, nll32), both("dlogits", g, g32).as(d)}
	if largestLoss := largestOf(nll); softcap > 0 && largestLoss > 0 {
		// The loss is a difference of capped logits. They are larger than it, and each is wrong by
		// a unit, the error of tanh in the libraries of GPUs.
		size := 0.0
		for _, x := range logits {
			if !math.IsNaN(x) {
				size = max(size, softcap*math.Tanh(math.Abs(x)/softcap))
			}
		}
		wants[0].chain = max(resolution, 2*ulp*size/largestLoss)
	}
	for _, l := range layouts {
		name := fmt.Sprintf("%dx%d %v%s", rows, vocab, l, suffix)
		args := func(b *bench, x *array) (*device.CrossEntropy, *array) {
			out := b.out("nll", tensor.F32, shifted, rows)
			return &device.CrossEntropy{Logits: x.Tensor, NLL: out.Tensor, GradScale: scale, Softcap: softcap,
				Targets: b.in("targets", tensor.I32, shifted, floats(targets), rows).Tensor}, out
		}
		s.check(name, wants, func(b *bench) ([]*array, error) {
			a, out := args(b, b.in("logits", from, l, logits, rows, vocab))
			g := b.out("dlogits", d, l, rows, vocab)
			a.DLogits = g.Tensor
			return []*array{out, g}, b.dev.CrossEntropy(b.stream, a)
		})
		if d != from {
			continue
		}
		s.check(name+" forward", wants[:1], func(b *bench) ([]*array, error) {
			a, out := args(b, b.in("logits", from, l, logits, rows, vocab))
			return []*array{out}, b.dev.CrossEntropy(b.stream, a)
		})
		s.check(name+" in place", wants, func(b *bench) ([]*array, error) {
			g := b.inout("logits", from, l, logits, rows, vocab)
			a, out := args(b, g)
			a.DLogits = g.Tensor
			return []*array{out, g}, b.dev.CrossEntropy(b.stream, a)
		})
	}
}
