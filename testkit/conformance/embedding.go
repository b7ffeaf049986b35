package conformance

import (
	"fmt"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

func testEmbedding(s *suite) {
	for _, c := range []struct{ vocab, n, tokens int64 }{{1, 1, 1}, {2, 3, 7}, {17, 65, 100}, {257, 64, 63},
		{5, 257, 300}, {3, 8, 0}, {256, 700, 17}, {3, 5, 4500}} {
		for _, l := range []layout{dense, padded} {
			s.typed(func(d tensor.DType, suffix string) { s.embeddingCase(d, suffix, c.vocab, c.n, c.tokens, l) })
		}
	}
	for _, id := range []float64{-1, 4, 1 << 30} {
		b := newBench(s.t, s.one)
		y := b.out("y", tensor.F32, dense, 2, 3)
		ids := b.in("ids", tensor.I32, dense, []float64{0, id}, 2)
		table := b.inout("table", tensor.F32, dense, make([]float64, 12), 4, 3)
		for name, err := range map[string]error{
			"forward": b.settle(b.dev.EmbeddingForward(b.stream,
				&device.Embedding{Table: table.Tensor, IDs: ids.Tensor, Y: y.Tensor})),
			"backward": b.settle(b.dev.EmbeddingBackward(b.stream,
				&device.EmbeddingGrad{IDs: ids.Tensor, DY: y.Tensor, DTable: table.Tensor})),
		} {
			if status.Of(err) != status.Internal {
				s.t.Errorf("%s: id %v of 4 gives %v, want status Internal", name, id, err)
			}
		}
		b.close()
	}
}

func (s *suite) embeddingCase(d tensor.DType, suffix string, vocab, n, tokens int64, l layout) {
	r := seeded(13, vocab, n)
	table, ids := normalAs(d, r, vocab*n), integers(r, tokens, vocab)
	dy, was := normalAs(d, r, tokens*n), normal(r, vocab*n)
	f := ref.Convert[float32, float64]
	sum, sum32 := append([]float64{}, was...), f(was)
	ref.EmbeddingGrad(n, ids, dy, sum)
	ref.EmbeddingGrad(n, ids, f(dy), sum32)
	plain := both("dtable", sum, sum32)
	plain.exact, plain.ref = true, plain.plain // the order of additions is part of the contract
	name := fmt.Sprint(vocab, n, tokens, l, suffix)
	s.check(name, []want{{name: "y", ref: ref.Embedding(n, table, ids), exact: true}},
		func(b *bench) ([]*array, error) {
			y := b.out("y", d, l, tokens, n)
			return []*array{y}, b.dev.EmbeddingForward(b.stream, &device.Embedding{
				Table: b.in("table", d, l, table, vocab, n).Tensor,
				IDs:   b.in("ids", tensor.I32, shifted, floats(ids), tokens).Tensor, Y: y.Tensor})
		})
	s.check(name+" backward", []want{plain}, func(b *bench) ([]*array, error) {
		dtable := b.inout("dtable", tensor.F32, l, was, vocab, n)
		return []*array{dtable}, b.dev.EmbeddingBackward(b.stream, &device.EmbeddingGrad{
			IDs: b.in("ids", tensor.I32, dense, floats(ids), tokens).Tensor,
			DY:  b.in("dy", d, l, dy, tokens, n).Tensor, DTable: dtable.Tensor})
	})
}

// settle returns the error of an operation, or of the stream if the operation was enqueued.
func (b *bench) settle(err error) error {
	if err != nil {
		return err
	}
	return b.stream.Sync()
}
