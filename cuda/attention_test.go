package cuda

import (
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/cudatest"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// TestAttentionHeads: heads that no kernel serves are refused by name, before anything runs.
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
		a := &device.Attention{Q: at(tensor.F32, 2, 1, size[0]), K: at(tensor.F32, 2, 1, size[0]), V: at(tensor.F32, 2, 1, size[1]), Out: at(tensor.F32, 2, 1, size[1]),
			LSE: at(tensor.F32, 2, 1), CuQ: []int64{0, 2}, CuK: []int64{0, 2}, Scale: 1}
		a.Workspace = at(tensor.U8, max(d.AttentionWorkspace(a, true), 1))
		g := &device.AttentionGrad{Attention: *a, DOut: a.Out, DQ: a.Q, DK: a.K, DV: a.V}
		for op, err := range map[string]error{"forward": d.AttentionForward(s, a), "backward": d.AttentionBackward(s, g)} {
			served := max(size[0], size[1]) <= 256
			if served && err != nil {
				t.Errorf("%s, heads %v: %v", op, size, err)
			}
			if !served && (status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), "head sizes")) {
				t.Errorf("%s, heads %v: %v, want a refusal that names the head sizes", op, size, err)
			}
		}
	}
	if err := s.Sync(); err != nil {
		t.Error(err)
	}
}
