package cpu

import (
	"math/rand/v2"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// The bound holds for any cut into documents, so that memory planned without knowing them suffices.
func TestAttentionBound(t *testing.T) {
	o, err := New(Options{Workers: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	r := rand.New(rand.NewPCG(1, 2))
	cut := func(n int64, docs int) []int64 {
		cu := make([]int64, docs+1)
		for i := 1; i < docs; i++ {
			cu[i] = cu[i-1] + r.Int64N(n-cu[i-1]+1)
		}
		cu[docs] = n
		return cu
	}
	for range 600 {
		tq, tk := 1+r.Int64N(9000), 1+r.Int64N(9000)
		if r.IntN(2) == 0 {
			tk = tq
		}
		heads, group, dim, dv := 1+r.Int64N(4), 1+r.Int64N(3), 1+r.Int64N(130), 1+r.Int64N(130)
		dtype := []tensor.DType{tensor.F32, tensor.BF16}[r.IntN(2)]
		a := device.Attention{Q: tensor.Of(nil, dtype, tq, heads*group, dim), K: tensor.Of(nil, dtype, tk, heads, dim),
			V: tensor.Of(nil, dtype, tk, heads, dv), Causal: r.IntN(2) == 0}
		if r.IntN(2) == 0 {
			a.Window = &device.Window{Left: r.Int64N(500) - 100, Right: r.Int64N(500) - 100}
		}
		docs := []int{1, 2, 3, 11, int(min(tq, tk))}[r.IntN(5)]
		for _, backward := range []bool{false, true} {
			bound := a
			a.CuQ, a.CuK = cut(tq, docs), cut(tk, docs)
			if tk == tq && r.IntN(2) == 0 {
				a.CuK = a.CuQ
			}
			if n, most := o.AttentionWorkspace(&a, backward), o.AttentionWorkspace(&bound, backward); n > most {
				t.Fatalf("%v, %d x %d, %d documents, %d x %d heads, D %d, Dv %d, causal %v, window %v, backward %v: %d bytes, bound %d",
					dtype, tq, tk, docs, heads, group, dim, dv, a.Causal, a.Window, backward, n, most)
			}
			a.CuQ, a.CuK = nil, nil
		}
	}
}
