package cuda

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// TestAttentionHeads: head sizes that no kernel supports are refused with a message before any
// work.
func TestAttentionHeads(t *testing.T) {
	cudatest.Use(t)
	d := opener(Options{Deterministic: true})(t, 1)
	defer d.Close()
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	b, err := d.Alloc(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	at := func(dtype tensor.DType, shape ...int64) tensor.Tensor {
		x := tensor.Of(b.Pointer(), dtype, shape...)
		x.Where = tensor.CUDA
		return x
	}
	for _, size := range [][2]int64{{256, 256}, {257, 16}, {16, 300}} {
		a := &device.Attention{Q: at(tensor.F32, 2, 1, size[0]), K: at(tensor.F32, 2, 1, size[0]),
			V: at(tensor.F32, 2, 1, size[1]), Out: at(tensor.F32, 2, 1, size[1]), LSE: at(tensor.F32, 2, 1),
			CuQ: []int64{0, 2}, CuK: []int64{0, 2}, Scale: 1}
		a.Workspace = at(tensor.U8, max(d.AttentionWorkspace(a, true), 1))
		g := &device.AttentionGrad{Attention: *a, DOut: a.Out, DQ: a.Q, DK: a.K, DV: a.V}
		for op, err := range map[string]error{"forward": d.AttentionForward(s, a),
			"backward": d.AttentionBackward(s, g)} {
			served := max(size[0], size[1]) <= 256
			if served && err != nil {
				t.Errorf("%s, heads %v: %v", op, size, err)
			}
			if !served && (status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), "head sizes")) {
				t.Errorf("%s, heads %v: %v, want an error that names the head sizes", op, size, err)
			}
		}
	}
	if err := s.Sync(); err != nil {
		t.Error(err)
	}
}

// TestAttentionOnTensorCores: reproducible calls in BF16 use tensor cores. Calls that tensor cores
// do not support fail with the reason.
func TestAttentionOnTensorCores(t *testing.T) {
	cudatest.Use(t)
	pinned := "attention_forward=mma,attention_backward=mma"
	for _, dim := range []int64{64, 128, 256} {
		bits := map[string][]float32{}
		// The same kernel runs the forward pass, so that the backward pass has the same input.
		for name, kernels := range map[string]string{"first": "attention_forward=mma", "mma": pinned,
			"own": "attention_forward=mma,attention_backward=own"} {
			dq, err := attentionDQ(t, kernels, tensor.BF16, dim, dim, 0.1)
			if err != nil {
				t.Fatalf("heads of %d, %s: %v", dim, name, err)
			}
			bits[name] = dq
		}
		if !slices.Equal(bits["first"], bits["mma"]) {
			t.Errorf("heads of %d: the backward pass does not use tensor cores", dim)
		}
		if slices.Equal(bits["mma"], bits["own"]) {
			t.Errorf("heads of %d: the own kernels and tensor cores give equal bits, so this test cannot tell them apart",
				dim)
		}
	}
	for _, c := range []attentionRefusal{
		{tensor.F32, 64, 64, 0.1, "BF16"},
		{tensor.BF16, 24, 64, 0.1, "multiple of 16"},
		{tensor.BF16, 64, 8, 0.1, "multiple of 16"},
		{tensor.BF16, 64, 272, 0.1, "at most 256"},
		{tensor.BF16, 64, 64, 0, "scale"},
		{tensor.BF16, 64, 64, -0.1, "scale"},
		{tensor.BF16, 64, 64, 1e-40, "scale"},
	} {
		c.check(t, pinned)
		if c.dim <= 256 && c.dv <= 256 {
			if _, err := attentionDQ(t, "", c.dtype, c.dim, c.dv, c.scale); err != nil {
				t.Errorf("%v, heads of %d and %d, scale %g: %v, want another kernel to run it", c.dtype, c.dim, c.dv,
					c.scale, err)
			}
		}
	}
}

// attentionRefusal is a call that selected kernels do not support, and a word of the reason.
type attentionRefusal struct {
	dtype   tensor.DType
	dim, dv int64
	scale   float64
	why     string
}

func (c attentionRefusal) check(t *testing.T, kernels string) {
	t.Helper()
	if _, err := attentionDQ(t, kernels, c.dtype, c.dim, c.dv, c.scale); status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(), c.why) {
		t.Errorf("%v, heads of %d and %d, scale %g: %v, want an error with %q", c.dtype, c.dim, c.dv, c.scale,
			err, c.why)
	}
}

// attentionDQ runs attention of two heads and 70 tokens forward and backward with the kernels, and
// returns dq, or the error.
func attentionDQ(t *testing.T, kernels string, dtype tensor.DType, dim, dv int64, scale float64) ([]float32, error) {
	d, s, alloc := opened(t, Options{Deterministic: true, Kernels: kernels})
	const n = 70
	random := func(width int64) tensor.Tensor {
		r := rand.New(rand.NewPCG(3, uint64(width)))
		values := make([]float32, n*2*width)
		for i := range values {
			values[i] = float32(r.NormFloat64())
		}
		x := alloc(dtype, n, 2, width)
		if err := d.Copy(s, x, tensor.OfFloat32(values, n, 2, width)); err != nil {
			t.Fatal(err)
		}
		return x
	}
	var g device.AttentionGrad
	g.Q, g.K, g.V, g.DOut = random(dim), random(dim), random(dv), random(dv)
	g.DQ, g.DK, g.DV, g.Out, g.LSE = alloc(dtype, n, 2, dim), alloc(dtype, n, 2, dim), alloc(dtype, n, 2, dv),
		alloc(dtype, n, 2, dv), alloc(tensor.F32, n, 2)
	g.CuQ, g.CuK, g.Causal, g.Scale = []int64{0, n}, []int64{0, n}, true, scale
	g.Workspace = alloc(tensor.U8,
		max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true)))
	if err := d.AttentionForward(s, &g.Attention); err != nil {
		return nil, err
	}
	if err := d.AttentionBackward(s, &g); err != nil {
		return nil, err
	}
	dq := make([]float32, g.DQ.Numel())
	if err := d.Copy(s, tensor.OfFloat32(dq, g.DQ.Dims()...), g.DQ); err != nil {
		t.Fatal(err)
	}
	return dq, s.Sync()
}
