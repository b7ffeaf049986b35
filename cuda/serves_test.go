package cuda

import (
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// TestLibrariesServe: on a GPU, cuBLASLt and cuDNN run the calls of models. The test selects these
// kernels, so that an unsupported call fails with the reason. Without the test, a library that
// cannot be used would only show in the time of a step.
func TestLibrariesServe(t *testing.T) {
	cudatest.Use(t)
	if cudatest.Emulated() {
		t.Skip("SKIPPED: the emulated plug-in has no libraries")
	}
	d, s, alloc := opened(t, Options{Kernels: "gemm=cublaslt,attention_forward=cudnn,attention_backward=cudnn"})
	for _, in := range []tensor.DType{tensor.BF16, tensor.F32} {
		t.Run("products of "+in.String(), func(t *testing.T) { productsOf(t, d, s, alloc, in) })
	}
	for _, c := range []struct {
		name   string
		hq, h  int64
		dim    int64
		q, k   []int64
		full   bool
		window *device.Window
		kv     []int64
	}{
		{name: "one document", hq: 8, h: 2, dim: 128, q: []int64{0, 2048}},
		{name: "a key head for each query head", hq: 4, h: 4, dim: 64, q: []int64{0, 1024}},
		{name: "sequences of a batch", hq: 8, h: 2, dim: 128, q: []int64{0, 512, 1024, 1536, 2048}},
		{name: "documents", hq: 8, h: 2, dim: 128, q: []int64{0, 300, 301, 1500, 2048}},
		{name: "documents of three heads", hq: 3, h: 1, dim: 128, q: []int64{0, 300, 1001}},
		{name: "full", hq: 8, h: 2, dim: 128, q: []int64{0, 1000}, full: true},
		{name: "fewer queries than keys", hq: 8, h: 2, dim: 128, q: []int64{0, 500}, k: []int64{0, 2048}},
		{name: "a window", hq: 8, h: 2, dim: 128, q: []int64{0, 2048}, window: &device.Window{Left: 255, Right: 0}},
		{name: "documents in a window", hq: 8, h: 2, dim: 128, q: []int64{0, 700, 2048},
			window: &device.Window{Left: 255, Right: 0}},
		{name: "one query", hq: 8, h: 2, dim: 128, q: []int64{0, 1}, k: []int64{0, 512}},
		{name: "heads of 256", hq: 4, h: 2, dim: 256, q: []int64{0, 1024}},
		// Qwen2.5-7B on 8 ranks
		{name: "the end of a group", hq: 4, h: 2, dim: 128, q: []int64{0, 2048}, kv: []int64{0, 0, 0, 1}},
		{name: "documents, whole groups and two partial ones", hq: 11, h: 4, dim: 128,
			q: []int64{0, 300, 301, 1500, 2048}, kv: []int64{0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}},
	} {
		t.Run("attention, "+c.name, func(t *testing.T) {
			if c.k == nil {
				c.k = c.q
			}
			tq, tk := c.q[len(c.q)-1], c.k[len(c.k)-1]
			take := func() (q, k, v, out tensor.Tensor) {
				return alloc(tensor.BF16, tq, c.hq, c.dim), alloc(tensor.BF16, tk, c.h, c.dim),
					alloc(tensor.BF16, tk, c.h, c.dim), alloc(tensor.BF16, tq, c.hq, c.dim)
			}
			var g device.AttentionGrad
			g.Q, g.K, g.V, g.Out = take()
			g.DQ, g.DK, g.DV, g.DOut = take()
			g.LSE, g.CuQ, g.CuK, g.KVHead, g.Causal, g.Window, g.Scale = alloc(tensor.F32, tq, c.hq), c.q, c.k, c.kv,
				!c.full, c.window, 0.1
			any := g.Attention // a query before the documents are known; its result must be enough
			any.CuQ, any.CuK = nil, nil
			g.Workspace = alloc(tensor.U8, max(d.AttentionWorkspace(&any, false), d.AttentionWorkspace(&any, true)))
			if err := d.AttentionForward(s, &g.Attention); err != nil {
				t.Error(err)
			}
			if err := d.AttentionBackward(s, &g); err != nil {
				t.Error(err)
			}
			if err := s.Sync(); err != nil {
				t.Error(err)
			}
		})
	}
	if err := s.Sync(); err != nil {
		t.Error(err)
	}
}

// productsOf runs the matrix products of models, with operands of type in.
func productsOf(t *testing.T, d *Device, s device.Stream, alloc func(tensor.DType, ...int64) tensor.Tensor,
	in tensor.DType) {
	const m, n, k = 384, 768, 512
	transposed := func(x tensor.Tensor) tensor.Tensor { return x.Permute(1, 0) }
	x, w, y, dy := alloc(in, m, k), alloc(in, n, k), alloc(in, m, n), alloc(in, m, n)
	for what, g := range map[string]*device.Gemm{
		"y = x·wᵀ":            {A: x, B: transposed(w), C: y},
		"y = x·wᵀ + bias":     {A: x, B: transposed(w), C: y, Bias: alloc(in, n)},
		"logits in F32":       {A: x, B: transposed(w), C: alloc(tensor.F32, m, n)},
		"logits + bias":       {A: x, B: transposed(w), C: alloc(tensor.F32, m, n), Bias: alloc(in, n)},
		"dx = dy·w":           {A: dy, B: w, C: x},
		"dx += dy·w":          {A: dy, B: w, C: x, Accumulate: true},
		"dw += dyᵀ·x, in F32": {A: transposed(dy), B: x, C: alloc(tensor.F32, n, k), Accumulate: true},
		"some of the rows":    {A: x.Slice(0, 1, 6), B: transposed(w), C: y.Slice(0, 1, 6)},
	} {
		if err := d.Gemm(s, g); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
