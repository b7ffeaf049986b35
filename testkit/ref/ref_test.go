package ref

import (
	"fmt"
	"math"
	"testing"

	"ulysses/testkit/near"
)

// each fails the test unless every element's error is at most tolerance times the element.
func each(t *testing.T, name string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", name, len(got), len(want))
	}
	for i := range want {
		near.Value(t, fmt.Sprintf("%s[%d]", name, i), got[i], want[i], tolerance*math.Abs(want[i]))
	}
}

// The expected values are from scaled_dot_product_attention of PyTorch 2.15 in float64, with a mask
// aligned bottom-right.
func TestAttentionKnown(t *testing.T) {
	a := &Attention{Hq: 1, Hkv: 1, D: 2, Dv: 1, CuQ: []int64{0, 2}, CuK: []int64{0, 3}, Causal: true, Scale: 0.5}
	q, k, v := []float64{0.1, -0.4, 0.7, 0.2}, []float64{0.3, 0.5, -0.2, 0.9, 0.8, -0.1}, []float64{1, -2, 0.5}
	out, lse := AttentionForward(a, q, k, v)
	each(t, "out", out, knownAttention[0], 1e-11)
	near.Value(t, "lse[0]", lse[0], math.Log(math.Exp((0.03-0.2)/2)+math.Exp((-0.02-0.36)/2)), 1e-14)
	dq, dk, dv := AttentionBackward(a, q, k, v, out, lse, []float64{0.6, -1.1})
	each(t, "dq", dq, knownAttention[1], 1e-10)
	each(t, "dk", dk, knownAttention[2], 1e-10)
	each(t, "dv", dv, knownAttention[3], 1e-10)
}

func TestAttentionSeesNothing(t *testing.T) {
	a := &Attention{Hq: 1, Hkv: 1, D: 1, Dv: 1, CuQ: []int64{0, 3}, CuK: []int64{0, 1}, Causal: true, Scale: 1}
	out, lse := AttentionForward(a, []float64{1, 1, 1}, []float64{2}, []float64{5})
	each(t, "out", out, []float64{0, 0, 5}, 0)
	if !math.IsInf(lse[0], -1) || !math.IsInf(lse[1], -1) || lse[2] != 2 {
		t.Errorf("lse = %v, want [-Inf -Inf 2]", lse)
	}
}

// The keys that a query sees, compared with the definition for each key.
func TestVisible(t *testing.T) {
	sides := []int64{-1, 0, 1, 2, 5, math.MaxInt64}
	for sq := range int64(6) {
		for sk := range int64(6) {
			for _, left := range sides {
				for _, right := range sides {
					for _, causal := range []bool{false, true} {
						a := &Attention{CuQ: []int64{0, 2, 2 + sq}, CuK: []int64{0, 3, 3 + sk}, Causal: causal,
							Window: &Window{left, right}}
						for i := range sq {
							lo, hi := a.Visible(2 + i)
							for j := range sk {
								at := i + sk - sq
								sees := !(causal && j > at) && !(left >= 0 && at-j > left) &&
									!(right >= 0 && j-at > right)
								if got := lo <= 3+j && 3+j < hi; got != sees {
									t.Fatalf(
										"query %d of %d, key %d of %d, causal %v, window %d %d: visible %v, want %v", i,
										sq, j, sk, causal, left, right, got, sees)
								}
							}
							if lo < hi && (lo < 3 || hi > 3+sk) {
								t.Fatalf("query %d of %d sees [%d, %d), outside of its document", i, sq, lo, hi)
							}
						}
					}
				}
			}
		}
	}
}

// The expected values are from torch.optim.AdamW of PyTorch 2.15 in float64: three steps with the
// gradient (0.3, -1, 2)·step. The formula of Update is that of torch/optim/adamw.py.
func TestAdamWKnown(t *testing.T) {
	w, m, v := []float64{1, -2, 0.5}, make([]float64, 3), make([]float64, 3)
	for step := int64(1); step <= 3; step++ {
		a := AdamW{LR: 0.1, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.2, GradScale: 0.5 * float64(step),
			Step: step}
		Update(a, w, []float64{0.6, -2, 4}, m, v)
	}
	each(t, "w", w, []float64{0.65681840636399946, -1.598010401742616, 0.18622240075231955}, 1e-14)
	each(t, "m", m, []float64{0.1683, -0.561, 1.122}, 1e-14)
	each(t, "v", v, []float64{0.06166125, 0.685125, 2.7405}, 1e-14)
}

func TestSGD(t *testing.T) {
	w := []float64{1, -2}
	SGD(w, []float64{4, 8}, 0.5, 0.1, 0.25)
	each(t, "w", w, []float64{0.95 - 0.5, -1.9 - 1}, 1e-15)
}

// The expected values are from transformers 5.23 for rope_type llama3, theta 500000, head_dim 16,
// factor 8, 1, 4, 8192; it computes in float32.
func TestLlama3Frequencies(t *testing.T) {
	f := Llama3{Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalLength: 8192}.Scale(RopeFrequencies(500000, 16))
	each(t, "frequency", f, knownLlama3, 1e-6)
}

func TestRopeTable(t *testing.T) {
	cos, sin := RopeTable[float64]([]int64{0, 2}, []float64{1, 0.25}, 2)
	each(t, "cos", cos, []float64{2, 2, 2 * math.Cos(2), 2 * math.Cos(0.5)}, 1e-15)
	each(t, "sin", sin, []float64{0, 0, 2 * math.Sin(2), 2 * math.Sin(0.5)}, 1e-15)
	// 16777213·0.3 in float32 is 5033164, and exactly 5033164.1
	cos, _ = RopeTable[float64]([]int64{16777213}, []float64{0.3}, 0)
	each(t, "cos of a float32 angle", cos, []float64{math.Cos(5033164)}, 1e-12)
	x := []float64{1, 2, 3, 4, 5}
	y := Rope(1, 1, 5, x, []float64{0, 1}, []float64{1, 0}, false)
	each(t, "y", y, []float64{-3, 2, 1, 4, 5}, 0)
	each(t, "inverse", Rope(1, 1, 5, y, []float64{0, 1}, []float64{1, 0}, true), x, 0)
}

func TestGemm(t *testing.T) {
	a, b := []float64{1, 2, 3, 4, 5, 6}, []float64{1, 0, 2, 1, 0, 3}
	each(t, "a·b", Gemm(2, 2, 3, a, b, nil, nil), []float64{5, 11, 14, 23}, 0)
	each(t, "a·b + bias + c", Gemm(2, 2, 3, a, b, []float64{1, 2}, []float64{10, 20, 30, 40}),
		[]float64{16, 33, 45, 65}, 0)
	each(t, "nothing to sum", Gemm(1, 2, 0, nil, nil, []float64{1, 2}, nil), []float64{1, 2}, 0)
}

func TestCrossEntropyKnown(t *testing.T) {
	nll, d := CrossEntropy(2, []float64{0, math.Log(3), 1000, 0}, []int64{0, 0}, 2)
	each(t, "nll", nll[:1], []float64{math.Log(4)}, 1e-15)
	each(t, "dlogits", d[:2], []float64{-1.5, 1.5}, 1e-15)
	if nll[1] != 0 || d[2] != 0 || d[3] != 0 {
		t.Errorf("a token with probability 1 has nll %v, gradient %v", nll[1], d[2:])
	}
}

func TestReductions(t *testing.T) {
	dst := []float64{1, 1}
	ColumnSum(dst, []float64{1, 2, 3, 4, 5, 6})
	each(t, "column sum", dst, []float64{10, 13}, 0)
	each(t, "sums", []float64{Sum(dst), SumSquares(dst)}, []float64{23, 269}, 0)
}
