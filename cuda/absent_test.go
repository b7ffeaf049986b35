package cuda

import (
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func absent(t *testing.T, deterministic bool) *Device {
	t.Helper()
	d, err := Open(Options{Ordinal: Absent, Deterministic: deterministic})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// attentionOf returns a query for workspace: shapes without memory.
func attentionOf(dtype tensor.DType, tokens, hq, hkv, dim int64) *device.Attention {
	of := func(heads int64) tensor.Tensor {
		x := tensor.Of(nil, dtype, tokens, heads, dim)
		x.Where = tensor.CUDA
		return x
	}
	return &device.Attention{Q: of(hq), K: of(hkv), V: of(hkv), Out: of(hq), Causal: true, Scale: 1}
}

// An absent GPU returns the same memory of operations as an existing one. All other calls fail.
func TestAbsent(t *testing.T) {
	d, _, _ := opened(t)
	a := absent(t, true)
	for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
		for _, tokens := range []int64{1, 100, 1 << 20, 1 << 32} {
			call := attentionOf(dtype, tokens, 6, 3, 64)
			for _, backward := range []bool{false, true} {
				if dtype == tensor.BF16 && !backward && !d.Details().Emulated {
					continue // cuDNN's plan may need more than the bound
				}
				if got, want := a.AttentionWorkspace(call, backward),
					d.AttentionWorkspace(call, backward); got != want || got == 0 {
					t.Errorf("attention of %d tokens in %v, backward %v: %d bytes on an absent GPU, %d on a GPU",
						tokens, dtype, backward, got, want)
				}
			}
			x := tensor.Of(nil, dtype, tokens, 2, 64)
			x.Where = tensor.CUDA
			g := tensor.Of(nil, tensor.F32, tokens, 2)
			g.Where = tensor.CUDA
			delta := &device.GatedDelta{Q: x, K: x, V: x, Out: x, G: g, Beta: g}
			if got, want := a.GatedDeltaSizes(delta), d.GatedDeltaSizes(delta); got != want || got.Saved == 0 {
				t.Errorf("gated delta rule over %d tokens in %v: %+v on an absent GPU, %+v on a GPU", tokens, dtype,
					got, want)
			}
		}
	}
	if i := a.Info(); i.Kind != "cuda" || i.Align != d.Info().Align || i.Place != d.Info().Place || !i.TokenMajor {
		t.Errorf("%+v", i)
	}
	_, memory := a.Alloc(64)
	_, stream := a.NewStream()
	_, event := a.NewEvent()
	for what, err := range map[string]error{"memory": memory, "stream": stream, "event": event} {
		if status.Of(err) != status.Device || !strings.Contains(err.Error(), "absent GPU") {
			t.Errorf("%s of an absent GPU: %v", what, err)
		}
	}
}

// For an absent GPU, the real plug-in returns at least the workspace that cuDNN needs on an H200
// (matrix/expected.md), without a driver.
func TestAbsentOfTheBuiltPlugin(t *testing.T) {
	needBuilt(t)
	t.Setenv(variable, built)
	a, repeatable := absent(t, false), absent(t, true)
	for _, c := range []struct {
		tokens, hq, hkv, mib int64
	}{{8192, 32, 8, 258}, {131072, 32, 8, 4128}, {1 << 20, 8, 2, 8256}} {
		call := attentionOf(tensor.BF16, c.tokens, c.hq, c.hkv, 128)
		got, own := a.AttentionWorkspace(call, true), repeatable.AttentionWorkspace(call, true)
		if got < c.mib<<20 || got > 3*c.mib<<20 {
			t.Errorf("%d tokens, %d:%d heads: %d MiB for the backward pass, cuDNN needs %d", c.tokens, c.hq, c.hkv,
				got>>20, c.mib)
		}
		if own <= 0 || own >= got {
			t.Errorf("%d tokens, %d:%d heads: %d MiB for a backward pass that is bitwise reproducible, which cuDNN does not compute",
				c.tokens, c.hq, c.hkv, own>>20)
		}
	}
}

// The kernel that a GPU would choose. A reproducible call never gets cuDNN's backward pass.
func TestAttentionKernel(t *testing.T) {
	t.Run("emulated", func(t *testing.T) {
		d, _, _ := opened(t)
		if !d.Details().Emulated {
			t.Skip("SKIPPED: the plug-in is the real one")
		}
		wantKernels(t, d, "mma", "mma", "mma")
		wantKernels(t, absent(t, false), "mma", "mma", "mma")
	})
	t.Run("built", func(t *testing.T) {
		needBuilt(t)
		t.Setenv(variable, built)
		wantKernels(t, absent(t, false), "cudnn", "cudnn", "mma")
		wantKernels(t, absent(t, true), "cudnn", "mma", "mma")
	})
}

// wantKernels checks the names of the kernels in BF16: forward, backward, and reproducible
// backward.
func wantKernels(t *testing.T, d *Device, want ...string) {
	t.Helper()
	ask := func(dtype tensor.DType, dim int64, backward, deterministic bool) (string, error) {
		a := attentionOf(dtype, 128, 6, 3, dim)
		a.LSE = tensor.Of(nil, tensor.F32, 128, 6)
		a.LSE.Where, a.Deterministic = tensor.CUDA, deterministic
		return d.AttentionKernel(a, backward)
	}
	for i, want := range want {
		if got, err := ask(tensor.BF16, 64, i > 0, i == 2); got != want || err != nil {
			t.Errorf("backward %v, deterministic %v: %q, %v, want %q", i > 0, i == 2, got, err, want)
		}
	}
	if got, err := ask(tensor.F32, 64, true, true); got != "own" || err != nil {
		t.Errorf("F32: %q, %v", got, err)
	}
	for _, backward := range []bool{false, true} {
		if got, err := ask(tensor.BF16, 272, backward, true); got != "" || status.Of(err) != status.Unsupported ||
			!strings.Contains(err.Error(), "head sizes 272 and 272") {
			t.Errorf("heads of 272, backward %v: %q, %v", backward, got, err)
		}
	}
}

// A reproducible call gets the workspace of the kernels that then support it.
func TestDeterministicWorkspace(t *testing.T) {
	needBuilt(t)
	t.Setenv(variable, built)
	a, repeatable := absent(t, false), absent(t, true)
	call := attentionOf(tensor.BF16, 8192, 32, 8, 128)
	any := a.AttentionWorkspace(call, true)
	call.Deterministic = true
	if got, want := a.AttentionWorkspace(call, true), repeatable.AttentionWorkspace(call, true); got != want ||
		got >= any {
		t.Errorf("%d bytes for a reproducible call, %d on a deterministic device, %d for other calls", got, want, any)
	}
}
