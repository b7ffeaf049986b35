package cpu

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// attentionCase describes a call whose tensors are in device memory, head-major or token-major.
type attentionCase struct {
	name              string
	cuQ, cuK          []int64
	heads, kvHeads    int64
	d, dv             int64
	kvHead            []int64
	causal, headMajor bool
	window            *device.Window
}

func (c *attentionCase) make(t testing.TB, d *Device) *device.AttentionGrad {
	return c.typed(t, d, tensor.F32)
}

func (c *attentionCase) typed(t testing.TB, d *Device, dtype tensor.DType) *device.AttentionGrad {
	tq, tk := c.cuQ[len(c.cuQ)-1], c.cuK[len(c.cuK)-1]
	of := func(rows, heads, n, seed int64) tensor.Tensor {
		x := floats(t, d, rows*heads*n+seed)
		data := unsafe.Pointer(unsafe.SliceData(x))
		if dtype == tensor.BF16 { // written over the F32 values
			for i, v := range x {
				*(*uint16)(unsafe.Add(data, 2*i)) = tensor.F32ToBF16(v)
			}
		}
		if c.headMajor {
			return tensor.Of(data, dtype, heads, rows, n).Permute(1, 0, 2)
		}
		return tensor.Of(data, dtype, rows, heads, n)
	}
	g := &device.AttentionGrad{
		Attention: device.Attention{
			Q: of(tq, c.heads, c.d, 1), K: of(tk, c.kvHeads, c.d, 2), V: of(tk, c.kvHeads, c.dv, 3),
			Out: of(tq, c.heads, c.dv, 4), LSE: tensor.OfFloat32(floats(t, d, c.heads*tq+1), c.heads, tq).Permute(1, 0),
			CuQ: c.cuQ, CuK: c.cuK, KVHead: c.kvHead, Causal: c.causal, Window: c.window,
			Scale: 1 / math.Sqrt(float64(c.d)),
		},
		DOut: of(tq, c.heads, c.dv, 5), DQ: of(tq, c.heads, c.d, 6), DK: of(tk, c.kvHeads, c.d, 7),
		DV: of(tk, c.kvHeads, c.dv, 8),
	}
	g.Workspace = workspace(t, d, &g.Attention)
	return g
}

func workspace(t testing.TB, d *Device, a *device.Attention) tensor.Tensor {
	n := max(d.AttentionWorkspace(a, true), d.AttentionWorkspace(a, false))
	b, err := d.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	w := unsafe.Slice((*byte)(b.Pointer()), n)
	for i := range w {
		w[i] = 0xff // NaN, to find reads of memory that was not written
	}
	return tensor.Of(b.Pointer(), tensor.U8, n)
}

func both(t testing.TB, d *Device, g *device.AttentionGrad) {
	if err := d.AttentionForward(nil, &g.Attention); err != nil {
		t.Fatal(err)
	}
	if err := d.AttentionBackward(nil, g); err != nil {
		t.Fatal(err)
	}
}

func element(x tensor.Tensor, t, h, e int64) float64 {
	p := unsafe.Add(x.Data, x.DType.Size()*(t*x.Stride[0]+h*x.Stride[1]+e*x.Stride[2]))
	if x.DType == tensor.BF16 {
		return float64(tensor.BF16ToF32(*(*uint16)(p)))
	}
	return float64(*(*float32)(p))
}

// array is a float64 array of a tensor's shape.
type array struct {
	n, m int64
	x    []float64
}

func arrayOf(t tensor.Tensor) *array {
	return &array{t.Shape[1], t.Shape[2], make([]float64, t.Numel())}
}
func (a *array) at(t, h, e int64) *float64 { return &a.x[(t*a.n+h)*a.m+e] }

// dense computes attention and its gradients by the definition, in float64.
func dense(g *device.AttentionGrad) (out, lse, dq, dk, dv *array) {
	out, dq, dk, dv = arrayOf(g.Out), arrayOf(g.Q), arrayOf(g.K), arrayOf(g.V)
	tq, heads, dim, n := g.Q.Shape[0], g.Q.Shape[1], g.Q.Shape[2], g.V.Shape[2]
	lse = &array{heads, 1, make([]float64, tq*heads)}
	for d := 0; d+1 < len(g.CuQ); d++ {
		q0, q1, k0, k1 := g.CuQ[d], g.CuQ[d+1], g.CuK[d], g.CuK[d+1]
		p := make([]float64, k1-k0)
		for h := range heads {
			kv := kvHead(&g.Attention, h)
			for i := q0; i < q1; i++ {
				begin, end := k0, k1
				if g.Causal {
					end = max(k0, min(k1, i+k1-q1+1))
				}
				if w := g.Window; w != nil && w.Left >= 0 && w.Left < i+k1-q1-k0 {
					begin = i + k1 - q1 - w.Left
				}
				if w := g.Window; w != nil && w.Right >= 0 && w.Right < q1-i {
					end = max(k0, min(end, i+k1-q1+w.Right+1))
				}
				if begin >= end {
					*lse.at(i, h, 0) = math.Inf(-1)
					continue
				}
				top, sum := math.Inf(-1), 0.0
				for j := begin; j < end; j++ {
					s := 0.0
					for e := range dim {
						s += element(g.Q, i, h, e) * element(g.K, j, kv, e)
					}
					p[j-k0] = s * g.Scale
					top = max(top, p[j-k0])
				}
				for j := begin; j < end; j++ {
					sum += math.Exp(p[j-k0] - top)
				}
				*lse.at(i, h, 0) = top + math.Log(sum)
				delta := 0.0
				for j := begin; j < end; j++ {
					p[j-k0] = math.Exp(p[j-k0] - *lse.at(i, h, 0))
					for e := range n {
						*out.at(i, h, e) += p[j-k0] * element(g.V, j, kv, e)
					}
				}
				for e := range n {
					delta += *out.at(i, h, e) * element(g.DOut, i, h, e)
				}
				for j := begin; j < end; j++ {
					dp := 0.0
					for e := range n {
						dp += element(g.DOut, i, h, e) * element(g.V, j, kv, e)
						*dv.at(j, kv, e) += p[j-k0] * element(g.DOut, i, h, e)
					}
					ds := p[j-k0] * (dp - delta) * g.Scale
					for e := range dim {
						*dq.at(i, h, e) += ds * element(g.K, j, kv, e)
						*dk.at(j, kv, e) += ds * element(g.Q, i, h, e)
					}
				}
			}
		}
	}
	return
}

// compare fails unless max|got - want| / max|want| is at most tolerance. NaN fails; equal
// infinities are equal.
func compare(t *testing.T, name string, got tensor.Tensor, want *array, tolerance float64) {
	t.Helper()
	worst, top := 0.0, 1e-30
	for i := range got.Shape[0] {
		for h := range want.n {
			for e := range want.m {
				w, x := *want.at(i, h, e), element(got, i, h, e)
				if math.IsInf(w, -1) && math.IsInf(x, -1) {
					continue
				}
				if d := math.Abs(x - w); !(d <= worst) {
					worst = d
				}
				top = max(top, math.Abs(w))
			}
		}
	}
	if !(worst/top <= tolerance) {
		t.Errorf("%s: error %.2e", name, worst/top)
	}
}

func cu(lengths ...int64) []int64 {
	c := []int64{0}
	for _, n := range lengths {
		c = append(c, c[len(c)-1]+n)
	}
	return c
}

var attentionCases = []attentionCase{
	{"one", cu(1), cu(1), 1, 1, 1, 1, nil, true, true, nil},
	{"causal", cu(300), cu(300), 2, 2, 64, 64, nil, true, true, nil},
	{"full", cu(257), cu(301), 2, 1, 16, 24, nil, false, false, nil},
	{"more keys", cu(70), cu(333), 1, 1, 33, 7, nil, true, false, nil},
	{"more queries", cu(333), cu(70), 3, 1, 3, 80, nil, true, true, nil},
	{"documents", cu(1, 0, 40, 200, 17, 0, 300), cu(1, 5, 60, 100, 17, 0, 300), 2, 2, 48, 48, nil, true, false, nil},
	{"documents, full", cu(1, 0, 40, 0, 17, 99), cu(1, 5, 60, 3, 0, 300), 2, 1, 128, 32, nil, false, true, nil},
	{"uneven groups", cu(100, 101), cu(100, 101), 4, 4, 20, 20, []int64{0, 0, 0, 2}, true, false, nil},
	{"parts", cu(500, 300), cu(500, 300), 2, 1, 40, 40, nil, true, true, nil},
	{"parts, full", cu(100, 640), cu(90, 377), 1, 1, 32, 33, nil, false, true, nil},
	{"left", cu(300), cu(300), 2, 1, 33, 20, nil, false, true, &device.Window{Left: 40, Right: -1}},
	{"right", cu(300), cu(300), 2, 1, 16, 16, nil, false, true, &device.Window{Left: -1, Right: 7}},
	{"none beside itself", cu(211, 30), cu(211, 30), 2, 2, 24, 24, nil, false, false, &device.Window{}},
	{"sliding", cu(450, 100), cu(450, 100), 4, 2, 40, 40, nil, true, true, &device.Window{Left: 130, Right: 5}},
	{"sliding, more keys", cu(70, 200), cu(333, 500), 3, 1, 16, 8, nil, true, true,
		&device.Window{Left: 60, Right: -1}},
	{"sliding, more queries", cu(333, 220), cu(70, 90), 2, 1, 16, 8, nil, false, true,
		&device.Window{Left: 20, Right: 33}},
	{"window beyond the document", cu(70, 1, 0, 130), cu(70, 1, 3, 130), 2, 1, 16, 16, nil, true, true,
		&device.Window{Left: math.MaxInt64, Right: math.MaxInt64}},
	{"parts, sliding", cu(900, 50), cu(900, 50), 2, 1, 80, 80, nil, true, true, &device.Window{Left: 250, Right: 0}},
	{"parts, both sides", cu(40, 900), cu(90, 700), 3, 1, 48, 80, nil, false, true,
		&device.Window{Left: 101, Right: 150}},
	{"no heads", cu(9), cu(9), 0, 2, 8, 8, []int64{}, true, true, nil},
}

// manySplits makes the backward pass split small heads as well.
func manySplits(t *testing.T) {
	before := splitFlops
	splitFlops = 5e6
	t.Cleanup(func() { splitFlops = before })
}

func TestAttention(t *testing.T) {
	manySplits(t)
	for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
		forward, backward := 2e-6, 4e-6
		if dtype == tensor.BF16 { // half a unit in the last place; the backward pass also reads out
			forward, backward = 0x1p-8, 0x1p-7
		}
		for _, c := range attentionCases {
			testAttention(t, &c, dtype, forward, backward)
		}
	}
}

func testAttention(t *testing.T, c *attentionCase, dtype tensor.DType, forward, backward float64) {
	g := c.typed(t, open(t, "", 1), dtype)
	out, lse, dq, dk, dv := dense(g)
	for _, isa := range ISAs() {
		t.Run(fmt.Sprintf("%s/%v/%s", c.name, dtype, isa), func(t *testing.T) {
			d := open(t, isa, 2)
			g := c.typed(t, d, dtype)
			both(t, d, g)
			compare(t, "out", g.Out, out, forward)
			compare(t, "lse",
				tensor.Tensor{Data: g.LSE.Data, DType: tensor.F32, NDim: 3,
					Shape:  [8]int64{g.LSE.Shape[0], g.LSE.Shape[1], 1},
					Stride: [8]int64{g.LSE.Stride[0], g.LSE.Stride[1], 1}}, lse, 1e-6)
			compare(t, "dq", g.DQ, dq, backward)
			compare(t, "dk", g.DK, dk, backward)
			compare(t, "dv", g.DV, dv, backward)
		})
	}
}

// hash returns a hash of the elements of some tensors.
func hash(x ...tensor.Tensor) (h uint64) {
	for _, t := range x {
		for i := range t.Shape[0] {
			for j := range t.Shape[1] {
				for e := range t.Shape[2] {
					h = h*1099511628211 + uint64(math.Float32bits(float32(element(t, i, j, e))))
				}
			}
		}
	}
	return
}

// The results of a head are bitwise equal for any number of workers and for any other heads.
func TestAttentionInvariance(t *testing.T) {
	manySplits(t)
	c := attentionCase{cuQ: cu(700, 37), cuK: cu(700, 37), heads: 6, kvHeads: 3, d: 64, dv: 64, causal: true,
		headMajor: true}
	for _, isa := range ISAs() {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			testInvariance(t, &c, isa, dtype)
		}
	}
}

// testInvariance runs a case with two query heads for each key head, with several numbers of
// workers, and then its second key head alone.
func testInvariance(t *testing.T, c *attentionCase, isa string, dtype tensor.DType) {
	var want uint64
	for _, workers := range []int{1, 2, 3, 5} {
		d := open(t, isa, workers)
		g := c.typed(t, d, dtype)
		both(t, d, g)
		h := hash(g.Out, g.DQ, g.DK, g.DV)
		if want == 0 {
			want = h
		}
		if h != want {
			t.Errorf("%s, %v: %d workers change the result", isa, dtype, workers)
		}
		if workers != 2 {
			continue
		}
		// Key head 1 with its query heads 2, 3 alone.
		q, kv := func(x tensor.Tensor) tensor.Tensor { return x.Slice(1, 2, 4) }, func(x tensor.Tensor) tensor.Tensor {
			return x.Slice(1, 1, 2)
		}
		before := hash(q(g.Out), q(g.DQ), kv(g.DK), kv(g.DV))
		one := *g
		one.Q, one.K, one.V, one.Out, one.LSE = q(g.Q), kv(g.K), kv(g.V), q(g.Out), q(g.LSE)
		one.DOut, one.DQ, one.DK, one.DV = q(g.DOut), q(g.DQ), kv(g.DK), kv(g.DV)
		both(t, d, &one)
		if hash(q(g.Out), q(g.DQ), kv(g.DK), kv(g.DV)) != before {
			t.Errorf("%s, %v: the results of a head depend on other heads", isa, dtype)
		}
	}
}

// All results that depend on a NaN are NaN, and no others.
func TestAttentionNaN(t *testing.T) {
	c := attentionCase{cuQ: cu(130), cuK: cu(130), heads: 1, kvHeads: 1, d: 16, dv: 16, causal: true, headMajor: true}
	for _, isa := range ISAs() {
		d := open(t, isa, 1)
		for _, nan := range []uint32{0x7fc00000, 0xffc00001, 0x7fc00001} {
			g := c.make(t, d)
			*at(g.K.Select(1, 0), 40, 3) = math.Float32frombits(nan)
			both(t, d, g)
			for i := range int64(130) {
				if x := element(g.Out, i, 0, 0); math.IsNaN(x) != (i >= 40) {
					t.Fatalf("%s: out[%d] = %g", isa, i, x)
				}
			}
			if !math.IsNaN(element(g.DQ, 129, 0, 0)) || !math.IsNaN(element(g.DK, 0, 0, 0)) ||
				!math.IsNaN(element(g.DV, 129, 0, 0)) {
				t.Errorf("%s: a gradient that depends on a NaN is not NaN", isa)
			}
		}
	}
}

// BenchmarkAttention reports the best rate of forward and backward together (3.5 times the
// forward's flops, causal counted as half).
func BenchmarkAttention(b *testing.B) {
	packed := cu(745, 1200, 310, 96, 2048, 640, 700, 512, 1024, 129, 788)
	cases := []struct {
		name         string
		lengths      []int64
		heads, kv, d int64
		causal       bool
	}{
		{"quickstart", cu(2048), 1, 1, 32, true}, {"quickstart", cu(2048), 2, 2, 64, true},
		{"causal", cu(2048), 8, 8, 64, true}, {"full", cu(2048), 8, 8, 64, false}, {"gqa", cu(2048), 8, 2, 64, true},
		{"causal", cu(2048), 8, 8, 128, true}, {"full", cu(2048), 8, 8, 128, false},
		{"packed", packed, 8, 2, 128, true}, {"causal", cu(8192), 8, 8, 64, true},
		{"causal", cu(8192), 8, 8, 128, true},
	}
	for _, isa := range ISAs()[:max(1, len(ISAs())-1)] {
		for _, workers := range []int{1, 2} {
			peak, _ := PeakFMA(workers, isa)
			for _, k := range cases {
				n := k.lengths[len(k.lengths)-1]
				b.Run(fmt.Sprintf("%s/%d/%s-S%d-D%d-H%d", isa, workers, k.name, n, k.d, k.heads), func(b *testing.B) {
					d := open(b, isa, workers)
					c := attentionCase{cuQ: k.lengths, cuK: k.lengths, heads: k.heads, kvHeads: k.kv, d: k.d, dv: k.d,
						causal: k.causal, headMajor: true}
					g := c.make(b, d)
					flops := 0.0
					for i := 1; i < len(k.lengths); i++ {
						s := float64(k.lengths[i] - k.lengths[i-1])
						flops += 4 * s * s * float64(k.d*k.heads)
					}
					if k.causal {
						flops /= 2
					}
					wall, cpu := best(b, func() error { return d.AttentionForward(nil, &g.Attention) },
						func() error { return d.AttentionBackward(nil, g) })
					rate := 3.5e-9 * flops / (wall[0] + wall[1])
					b.ReportMetric(flops/wall[0]*1e-9, "F")
					b.ReportMetric(2.5*flops/wall[1]*1e-9, "B")
					b.ReportMetric(rate, "GF/s")
					b.ReportMetric(rate/peak, "ofpeak")
					b.ReportMetric(3.5e-9*flops/(cpu[0]+cpu[1])*float64(workers)/peak, "ofpeak/cpu")
				})
			}
		}
	}
}
