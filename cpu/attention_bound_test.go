package cpu

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// The workspace without given documents is enough for all documents.
func TestAttentionBound(t *testing.T) {
	o, err := New(Options{Workers: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	r := rand.New(rand.NewPCG(1, 2))
	divide := func(n int64, docs int) []int64 {
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
		if r.IntN(3) == 0 {
			a.Slopes, a.Softcap = tensor.Of(nil, tensor.F32, heads*group), float64(r.IntN(2))
		}
		if r.IntN(3) == 0 {
			a.BlockRows, a.BlockColumns, a.QuerySeq, a.KeySeq = 1+r.Int64N(200), 64, tq, tk
			a.BlockMask = tensor.Of(nil, tensor.U8, 1, ceilDiv(tq, a.BlockRows), ceilDiv(tk, 64))
		}
		shifts := r.IntN(3) == 0
		docs := []int{1, 2, 3, 11, int(min(tq, tk))}[r.IntN(5)]
		for _, backward := range []bool{false, true} {
			bound := a
			a.CuQ, a.CuK = divide(tq, docs), divide(tk, docs)
			if tk == tq && r.IntN(2) == 0 {
				a.CuK = a.CuQ
			}
			if shifts {
				a.Shift, bound.Shift = make([]int64, docs), []int64{}
				for i := range a.Shift {
					a.Shift[i] = r.Int64N(2*tk) - tk
				}
			}
			if n, most := o.AttentionWorkspace(&a, backward), o.AttentionWorkspace(&bound, backward); n > most {
				t.Fatalf(
					"%v, %d x %d, documents %v and %v, %d x %d heads, D %d, Dv %d, causal %v, window %v, shifts %v, blocks of %d, backward %v: %d bytes, bound %d",
					dtype, tq, tk, a.CuQ, a.CuK, heads, group, dim, dv, a.Causal, a.Window, a.Shift, a.BlockRows,
					backward, n, most)
			}
			a.CuQ, a.CuK, a.Shift = nil, nil, nil
		}
	}
}

// For one document, the bound has the numbers that iterating over its blocks gives. It does not
// iterate, so it is fast for documents of any length.
func TestAttentionBoundIsArithmetic(t *testing.T) {
	o, err := New(Options{Workers: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	d := o.(*Device)
	for tq := int64(0); tq < 1500; tq = tq*9/8 + 1 {
		for tk := int64(0); tk < 1500; tk = tk*9/8 + 1 {
			for _, causal := range []bool{true, false} {
				a := device.Attention{Q: tensor.Of(nil, tensor.F32, tq, 4, 16),
					K: tensor.Of(nil, tensor.F32, tk, 2, 16), V: tensor.Of(nil, tensor.F32, tk, 2, 24),
					Causal: causal, CuQ: []int64{0, tq}, CuK: []int64{0, tk}}
				for _, backward := range []bool{false, true} {
					walked, counted := d.planAttention(&a, backward, nil), attentionLayout{blocks: blocksOf(tq, tk)}
					d.planTables(&a, &counted, backward)
					if walked.blocks != counted.blocks || walked.partialOffset != counted.partialOffset ||
						walked.largestGroup != counted.largestGroup ||
						causal && tq <= tk && causalPairs(tq, tk) != float64(walked.pairs) {
						t.Fatalf("%d x %d, causal %v, backward %v: %+v, counted %+v and %v pairs", tq, tk, causal,
							backward, walked, counted, causalPairs(tq, tk))
					}
				}
			}
		}
	}
	for _, backward := range []bool{false, true} {
		last := int64(0)
		// iterating over the blocks of the longest would take minutes
		for tokens := int64(1); tokens <= 1<<40; tokens *= 2 {
			x := tensor.Of(nil, tensor.BF16, tokens, 1, 256)
			n := o.AttentionWorkspace(&device.Attention{Q: x, K: x, V: x, Causal: true}, backward)
			if n < last || n < tokens {
				t.Errorf("%d tokens, backward %v: %d bytes, for half as many %d", tokens, backward, n, last)
			}
			last = n
		}
	}
}

// Blocks of queries behind the last visible pair belong to the last split.
func TestSplitsEndWithQueriesThatSeeNothing(t *testing.T) {
	o, err := New(Options{Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	d := o.(*Device)
	for _, shift := range []int64{0, 100, 4000, 5000, -4900, -1 << 50, 1 << 50} {
		for _, many := range []bool{false, true} {
			if many {
				manySplits(t)
			}
			x := tensor.Of(nil, tensor.F32, 5000, 2, 16)
			a := device.Attention{Q: x, K: x, V: x, Causal: true, Window: &device.Window{Left: 50, Right: -1},
				CuQ: []int64{0, 5000}, CuK: []int64{0, 5000}, Shift: []int64{shift}}
			if l := d.planAttention(&a, true, nil); l.splits < 1 || l.splits > splitsFor(float64(l.pairs), 16, 16) {
				t.Errorf("shift %d: %d splits for %d pairs", shift, l.splits, l.pairs)
			}
		}
	}
}

// The pairs of the longest call are counted without overflow. Longer calls are refused, with both
// numbers, and their workspace is the bound.
func TestLongestAttention(t *testing.T) {
	o, err := New(Options{Workers: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	of := func(n int64) device.Attention {
		x := tensor.Of(nil, tensor.F32, n, 1, 16)
		return device.Attention{Q: x, K: x, V: x, Out: x, LSE: tensor.Of(nil, tensor.F32, n, 1), Causal: true, Scale: 1,
			CuQ: []int64{0, n}, CuK: []int64{0, n}}
	}
	longest := of(maxAttentionRows)
	if l := o.(*Device).planAttention(&longest, false, nil); float64(l.pairs) != causalPairs(maxAttentionRows,
		maxAttentionRows) {
		t.Errorf("%d pairs, want %v", l.pairs, causalPairs(maxAttentionRows, maxAttentionRows))
	}
	for _, n := range []int64{maxAttentionRows + 1, 1 << 34, 1 << 40} {
		a := of(n)
		for _, backward := range []bool{false, true} {
			bound := a
			bound.CuQ, bound.CuK = nil, nil
			if got, want := o.AttentionWorkspace(&a, backward), o.AttentionWorkspace(&bound, backward); got != want {
				t.Errorf("%d tokens, backward %v: %d bytes, want the bound %d", n, backward, got, want)
			}
		}
		err := o.AttentionForward(nil, &a)
		if err == nil || !strings.Contains(err.Error(), strconv.FormatInt(n, 10)) ||
			!strings.Contains(err.Error(), strconv.FormatInt(maxAttentionRows, 10)) {
			t.Errorf("%d tokens: %v", n, err)
		}
	}
}
