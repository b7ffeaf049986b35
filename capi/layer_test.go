package main

import (
	"math"
	"slices"
	"testing"
	"unsafe"

	"ulysses/internal/status"
)

// newFloats returns a tensor of a shape with numbers between -1 and 1, and its memory.
func newFloats(shape []int64, seed int) ([]float32, *cTensor) {
	n := int64(1)
	for _, e := range shape {
		n *= e
	}
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(math.Sin(float64(seed*31+i*7) * 1.7))
	}
	return x, &cTensor{data: p(&x[0]), device: onCPU, ndim: int32(len(shape)), code: 2, bits: 32, lanes: 1,
		shape: &shape[0]}
}

// The gradients of a whole layer with biases, norms and rotation agree with finite differences of
// the loss, for x and for every weight, and for sinks and slopes if the layer has options.
func TestLayerGradients(t *testing.T) {
	t.Run("plain", func(t *testing.T) { testLayerGradients(t, flagCausal) })
	t.Run("overlap", func(t *testing.T) { testLayerGradients(t, flagCausal|flagOverlap) })
	t.Run("options", func(t *testing.T) {
		testLayerGradients(t, flagCausal|flagSinks|flagAlibi|flagBlockMask, func(d *cAttentionDesc) {
			d.softcap, d.dropout, d.block_q, d.block_k = 1.5, 0.2, 2, 2
		})
	})
}

func testLayerGradients(t *testing.T, flags int32, more ...func(*cAttentionDesc)) {
	const b, s, hq, hkv, d, hidden = 2, 5, 4, 2, 8, 12
	h := newHostOf(t, b, s, hq, hkv, d, flags, more...)
	names := []string{"x", "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "q_norm", "k_norm", "cos", "sin", "y",
		"dy", "dx"}
	shapes := [][]int64{{b, s, hidden}, {hq * d, hidden}, {hkv * d, hidden}, {hkv * d, hidden}, {hidden, hq * d},
		{hq * d}, {hkv * d}, {hkv * d}, {hidden}, {d}, {d},
		{b * s, d / 2}, {b * s, d / 2}, {b, s, hidden}, {b, s, hidden}, {b, s, hidden}}
	data, ts := make([][]float32, len(names)), make([]*cTensor, len(names))
	for i := range names {
		data[i], ts[i] = newFloats(shapes[i], i)
	}
	for i := range data[11] { // angles
		a := float64(i) * 0.3
		data[11][i], data[12][i] = float32(math.Cos(a)), float32(math.Sin(a))
	}
	a := cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(cAttentionLayerArgs{})), hidden: hidden, x: ts[0],
		wq: ts[1], wk: ts[2], wv: ts[3], wo: ts[4], bq: ts[5], bk: ts[6], bv: ts[7],
		bo: ts[8], q_norm: ts[9], k_norm: ts[10], cos: ts[11], sin: ts[12], y: ts[13]}
	sinks, sinksT := newFloats([]int64{hq}, 20)
	slopes, slopesT := newFloats([]int64{hq}, 21)
	mask := []uint8{1, 0, 0, 0, 1, 1, 1, 0, 1} // the second row hides the first keys, the third the middle
	if flags&flagSinks != 0 {
		a.sinks, a.alibi, a.dropout_seed = sinksT, slopesT, 7
		a.block_mask = &cTensor{data: p(&mask[0]), device: onCPU, ndim: 3, code: 1, bits: 8, lanes: 1,
			shape: &[]int64{1, 3, 3}[0]}
	}
	size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
	must(t, attentionLayerSizes(h.plan, h.batch, p(&a), p(&size)))
	a.workspace, a.workspace_bytes = aligned(size.workspace), size.workspace
	loss := func() (sum float64) {
		must(t, attentionLayerForward(h.plan, h.batch, p(&a)))
		for i, y := range data[13] {
			sum += float64(y) * float64(data[14][i])
		}
		return sum
	}
	without := loss() // saved NULL
	a.saved, a.saved_bytes = aligned(size.saved), size.saved
	if with := loss(); with != without {
		t.Errorf("the loss is %v with saved memory and %v without", with, without)
	}
	grads, gt := make([][]float32, 11), make([]*cTensor, 11)
	for i := 1; i < 11; i++ {
		grads[i], gt[i] = newFloats(shapes[i], 0)
		clear(grads[i])
	}
	grads[0] = data[15]
	g := cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(cAttentionLayerGrads{})), dy: ts[14], dx: ts[15],
		dwq: gt[1], dwk: gt[2], dwv: gt[3], dwo: gt[4], dbq: gt[5], dbk: gt[6],
		dbv: gt[7], dbo: gt[8], dq_norm: gt[9], dk_norm: gt[10]}
	dsinks, dsinksT := newFloats([]int64{hq}, 0)
	dslopes, dslopesT := newFloats([]int64{hq}, 0)
	clear(dsinks)
	clear(dslopes)
	if flags&flagSinks != 0 {
		g.dsinks, g.dalibi = dsinksT, dslopesT
	}
	must(t, attentionLayerBackward(h.plan, h.batch, p(&a), p(&g)))
	for i := range 11 {
		checkSlope(t, names[i], data[i], grads[i], i, loss)
	}
	if flags&flagSinks != 0 {
		checkSlope(t, "sinks", sinks, dsinks, 11, loss)
		checkSlope(t, "slopes", slopes, dslopes, 12, loss)
		if slices.Max(dsinks) == 0 && slices.Min(dsinks) == 0 || slices.Max(dslopes) == 0 && slices.Min(dslopes) == 0 {
			t.Errorf("the gradients of sinks are %v, of slopes %v", dsinks, dslopes)
		}
	}
	// The pass adds to the gradients of weights. A gradient that is not wanted may be NULL.
	first := grads[1][3]
	g.dwk, g.dq_norm, g.dbv = nil, nil, nil
	must(t, attentionLayerForward(h.plan, h.batch, p(&a)))
	must(t, attentionLayerBackward(h.plan, h.batch, p(&a), p(&g)))
	if grads[1][3] != 2*first || first == 0 {
		t.Errorf("dwq is %v after two passes and %v after one, want twice the value", grads[1][3], first)
	}
	a.q_norm = nil
	refused(t, "q_norm is NULL and k_norm is not", status.InvalidArgument,
		attentionLayerForward(h.plan, h.batch, p(&a)))
}

// checkSlope compares the slope of the loss along a direction, by finite differences of x, with the
// gradient.
func checkSlope(t *testing.T, name string, x, grad []float32, seed int, loss func() float64) {
	t.Helper()
	const step = 1e-2
	dot, norm := 0.0, 0.0
	keep := append([]float32(nil), x...)
	dir := make([]float64, len(keep))
	for j := range dir {
		dir[j] = math.Cos(float64(j*j + seed))
		dot += dir[j] * float64(grad[j])
		norm += dir[j] * dir[j]
	}
	norm = math.Sqrt(norm)
	move := func(by float64) float64 {
		for j := range dir {
			x[j] = keep[j] + float32(by*dir[j]/norm)
		}
		return loss()
	}
	slope := (move(step) - move(-step)) / (2 * step)
	copy(x, keep)
	// NaN fails
	if want := dot / norm; !(math.Abs(slope-want) <= 2e-2*math.Max(1, math.Abs(want))) {
		t.Errorf("%s: finite differences give the slope %v, the gradient %v", name, slope, want)
	}
}
