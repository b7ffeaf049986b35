package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/tensor"
)

// Gemm computes C [M, N] = A [M, K]·B [K, N] (+ Bias [N]) (+ C). With K = 0 the product is zero. A
// NaN or infinity in A or B affects every element of C that depends on it. Sums over K are F32; if
// C is BF16 they are rounded once. With AVX512_BF16, products of BF16 treat denormal operands and
// sums as zero.
func (d *Device) Gemm(_ device.Stream, a *device.Gemm) error {
	defer runtime.KeepAlive(a)
	c := check{op: "Gemm"}
	dtype, bf16 := c.compute("A", a.A)
	c.shape("A", a.A, dtype, whatever, whatever)
	m, k, n := a.A.Shape[0], a.A.Shape[1], a.B.Shape[1]
	c.shape("B", a.B, dtype, k, n)
	out, round := dtype, bf16
	if a.C.DType == tensor.F32 {
		out, round = tensor.F32, 0
	}
	c.typed("C", a.C, out, m, n)
	if !a.Bias.IsNil() {
		c.dense("bias", a.Bias, dtype, n)
		if a.Accumulate {
			c.fail("Bias with Accumulate; give one of them")
		}
	}
	ars, acs, okA := unitStride(a.A)
	brs, bcs, okB := unitStride(a.B)
	if !okA || !okB {
		c.fail("A is %v and B is %v; each needs an axis of stride 1", a.A, a.B)
	}
	if c.err != nil || m == 0 || n == 0 {
		return c.err
	}
	most := [2]int64{m, C.ULY_GEMM_NC}
	if round == 1 && k > C.ULY_GEMM_KC*d.table.pair {
		most = [2]int64{C.ULY_GEMM_SUM_ROWS, C.ULY_GEMM_SUM_NC}
	}
	rows, columns := gemmSplit(m, n, k, int64(d.workers), most)
	p := (*C.gemm_args)(d.args)
	*p = C.gemm_args{
		bf16: bf16, round: round,
		m: C.int64_t(m), n: C.int64_t(n), k: C.int64_t(k),
		a: a.A.Data, b: a.B.Data, bias: a.Bias.Data, c: a.C.Data,
		ars: C.int64_t(ars), acs: C.int64_t(acs), brs: C.int64_t(brs), bcs: C.int64_t(bcs),
		ldc: C.int64_t(a.C.Stride[0]), rows: C.int64_t(rows), columns: C.int64_t(columns),
	}
	if a.Accumulate {
		p.accumulate = 1
	}
	return d.run(C.K_gemm, ceilDiv(m, rows)*ceilDiv(n, columns))
}

// unitStride returns the strides of a matrix such that the column stride or the row stride is 1, as
// packing requires. The stride of an axis with one element is arbitrary. ok is false if neither is
// 1.
func unitStride(t tensor.Tensor) (row, column int64, ok bool) {
	switch {
	case t.Stride[1] == 1 || t.Shape[1] <= 1:
		return t.Stride[0], 1, true
	case t.Stride[0] == 1 || t.Shape[0] <= 1:
		return 1, t.Stride[1], true
	}
	return 0, 0, false
}

// ceilDiv returns a/b, rounded up.
func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

// gemmSplit returns the size of the blocks of C, one for each task, at most `most` rows and
// columns. It minimizes the work of the busiest worker, including packing: each task packs its
// columns of B, and A is packed once for each block of columns. The results do not depend on the
// blocks, because the sum of an element is the same in every block.
func gemmSplit(m, n, k, workers int64, most [2]int64) (rows, columns int64) {
	const (
		// rows and columns of a block are multiples of it, to fill register tiles
		grain        = 16
		small        = 1 << 20  // with fewer multiply-adds, one worker computes all
		packA, packB = 4.0, 8.0 // cost of packing an element, in multiply-adds
		// additional cost of a task as a share of its work; of equal costs the fewest tasks win
		taskCost = 1.0 / 1024
	)
	if float64(m)*float64(n)*float64(k) < small {
		workers = 1
	}
	best := -1.0
	leastDown, leastAcross := ceilDiv(m, most[0]), ceilDiv(n, most[1])
	for across := leastAcross; across <= leastAcross+4*workers; across++ {
		c := ceilDiv(ceilDiv(n, across), grain) * grain
		for down := leastDown; down < leastDown+4*workers; down++ {
			r := ceilDiv(ceilDiv(m, down), grain) * grain
			tasks := ceilDiv(m, r) * ceilDiv(n, c)
			work := float64(min(r, m))*float64(min(c, n)) + packA*float64(min(r, m)) + packB*float64(min(c, n))
			cost := float64(ceilDiv(tasks, workers))*work + taskCost*float64(tasks)*work
			if best < 0 || cost < best {
				best, rows, columns = cost, r, c
			}
			if r <= grain {
				break
			}
		}
		if workers == 1 || c <= grain {
			break
		}
	}
	return rows, columns
}
