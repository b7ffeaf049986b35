package cuda

import (
	"cmp"
	"math"
	"math/rand/v2"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// TestAttentionBeyond2To31 has tensors of more than 2^31 elements. With a window, the last tokens
// attend to few tokens, so a short call with only these tokens must give the same results.
func TestAttentionBeyond2To31(t *testing.T) {
	cudatest.Use(t)
	if cudatest.Emulated() {
		t.Skip("SKIPPED: needs 48 GiB of a GPU")
	}
	for _, kernels := range []string{"", "attention_forward=wgmma,attention_backward=wgmma"} {
		t.Run(cmp.Or(kernels, "chosen"), func(t *testing.T) { attentionBeyond2To31(t, kernels) })
	}
}

func attentionBeyond2To31(t *testing.T, kernels string) {
	d, s, alloc := opened(t, Options{Kernels: kernels})
	if details := d.Details(); details.Free < 48<<30 || kernels != "" && details.SM != 90 {
		t.Skipf("SKIPPED: needs 48 GiB, %d bytes are free; wgmma also needs compute capability 9.0, not %d",
			details.Free, details.SM)
	}
	const hq, h, dim, far, short, left = 32, 8, 128, 1<<19 + 1<<14, 4096, 1023 // far·hq·dim = 2.2e9
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// run returns out, dq, dk and dv of the last tokens. All other tokens are zeros.
	run := func(n int64) (results [4][]float64) {
		r := rand.New(rand.NewPCG(1, 2))
		last := func(x tensor.Tensor) tensor.Tensor { return x.Slice(0, n-short, n) }
		random := func(heads int64) tensor.Tensor {
			values := make([]float32, short*heads*dim)
			for i := range values {
				values[i] = float32(r.NormFloat64())
			}
			x := alloc(tensor.BF16, n, heads, dim)
			must(d.Copy(s, last(x), tensor.OfFloat32(values, short, heads, dim)))
			return x
		}
		var g device.AttentionGrad
		g.Q, g.K, g.V, g.DOut = random(hq), random(h), random(h), random(hq)
		g.Out, g.DQ, g.DK, g.DV = alloc(tensor.BF16, n, hq, dim), alloc(tensor.BF16, n, hq, dim),
			alloc(tensor.BF16, n, h, dim), alloc(tensor.BF16, n, h, dim)
		g.LSE, g.Causal, g.Window, g.Scale = alloc(tensor.F32, n, hq), true, &device.Window{Left: left, Right: 0},
			1/math.Sqrt(dim)
		g.CuQ, g.CuK = []int64{0, n}, []int64{0, n}
		g.Workspace = alloc(tensor.U8,
			max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true)))
		must(d.AttentionForward(s, &g.Attention))
		must(d.AttentionBackward(s, &g))
		for i, x := range []tensor.Tensor{g.Out, g.DQ, g.DK, g.DV} {
			part := x.Slice(0, n-short+left, n) // the tokens that attend to none of the others
			host := make([]float32, part.Numel())
			must(d.Copy(s, tensor.OfFloat32(host, part.Dims()...), part))
			must(s.Sync())
			for _, v := range host {
				results[i] = append(results[i], float64(v))
			}
		}
		return results
	}
	want, got := run(short), run(far)
	for i, name := range []string{"out", "dq", "dk", "dv"} {
		var worst, size float64
		for j, w := range want[i] {
			worst, size = max(worst, math.Abs(got[i][j]-w)), max(size, math.Abs(w)) // keeps NaN
		}
		if !(worst <= size/128) || size == 0 {
			t.Errorf("%s of %d tokens differs by %g from a call with the last %d tokens only, whose maximum is %g",
				name, int64(far), worst, int64(short), size)
		}
	}
}
