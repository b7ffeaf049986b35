package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// deltaCase describes a call.
type deltaCase struct {
	ref.GatedDelta
	chunk     int64
	decay     float64 // g is uniform in [-decay, 0]
	headMajor bool
	perHead   bool
}

// deltaData are the inputs, row-major and dense.
type deltaData struct{ q, k, v, g, beta, in, dout, dlast []float32 }

func (c *deltaCase) data(seed uint64) *deltaData {
	r := rand.New(rand.NewPCG(seed, 3))
	normal := func(n int64, scale float64) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(scale * r.NormFloat64())
		}
		return x
	}
	t, state := c.T(), c.Hv*c.Dk*c.Dv
	k := 1 / math.Sqrt(float64(c.Dk))
	x := &deltaData{normal(t*c.Hk*c.Dk, 1), normal(t*c.Hk*c.Dk, k), normal(t*c.Hv*c.Dv, 1), normal(t*c.Hv, 1),
		normal(t*c.Hv, 1), normal(c.In*state, 1), normal(t*c.Hv*c.Dv, 1), normal(c.Out*state, 1)}
	for i := range x.g {
		x.g[i] = -float32(c.decay * r.Float64())
		x.beta[i] = float32(1 / (1 + math.Exp(-float64(x.beta[i]))))
	}
	return x
}

func wide(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// make returns the call with its tensors in device memory.
func (c *deltaCase) make(t testing.TB, d *Device, x *deltaData) *device.GatedDeltaGrad {
	tokens := c.T()
	of := func(values []float32, heads, n int64) tensor.Tensor {
		m := floats(t, d, tokens*heads*n+1)
		y := tensor.OfFloat32(m, tokens, heads, n)
		if c.headMajor {
			y = tensor.OfFloat32(m, heads, tokens, n).Permute(1, 0, 2)
		}
		for i, v := range values {
			at := int64(i)
			*(*float32)(unsafe.Add(y.Data, 4*(at/(heads*n)*y.Stride[0]+at/n%heads*y.Stride[1]+at%n))) = v
		}
		return y
	}
	states := func(values []float32, n int64) tensor.Tensor {
		if n == 0 {
			return tensor.Tensor{}
		}
		m := floats(t, d, n*c.Hv*c.Dk*c.Dv)
		copy(m, values)
		return tensor.OfFloat32(m, n, c.Hv, c.Dk, c.Dv)
	}
	keys := c.Hk
	if c.perHead {
		keys = c.Hv
	}
	g := &device.GatedDeltaGrad{
		GatedDelta: device.GatedDelta{Q: of(x.q, c.Hk, c.Dk), K: of(x.k, c.Hk, c.Dk), V: of(x.v, c.Hv, c.Dv),
			Out: of(nil, c.Hv, c.Dv), G: of(x.g, c.Hv, 1).Select(2, 0), Beta: of(x.beta, c.Hv, 1).Select(2, 0),
			Cu: c.Cu, KeyHead: c.KeyHead, L2Norm: c.L2Norm, Scale: c.Scale, Chunk: c.chunk, StateIn: states(x.in, c.In),
			StateOut: states(nil, c.Out)},
		DOut: of(x.dout, c.Hv, c.Dv), DStateOut: states(x.dlast, c.Out), DQ: of(nil, keys, c.Dk),
		DK: of(nil, keys, c.Dk), DV: of(nil, c.Hv, c.Dv), DG: of(nil, c.Hv, 1).Select(2, 0),
		DBeta: of(nil, c.Hv, 1).Select(2, 0), DStateIn: states(nil, c.In),
		PerHead: c.perHead,
	}
	sizes := d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = bytes(t, d, sizes.Saved), bytes(t, d, max(sizes.Forward, sizes.Backward, sizes.State))
	return g
}

// bytes returns memory full of NaN, to find reads of memory that was not written.
func bytes(t testing.TB, d *Device, n int64) tensor.Tensor {
	b, err := d.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	for i := range n {
		*(*byte)(unsafe.Add(b.Pointer(), i)) = 0xff
	}
	return tensor.Of(b.Pointer(), tensor.U8, n)
}

func bothDelta(t testing.TB, d *Device, g *device.GatedDeltaGrad) {
	t.Helper()
	if err := d.GatedDeltaForward(nil, &g.GatedDelta); err != nil {
		t.Fatal(err)
	}
	if err := d.GatedDeltaBackward(nil, g); err != nil {
		t.Fatal(err)
	}
}

// values reads a tensor in row-major order.
func values(x tensor.Tensor) []float64 {
	if x.IsNil() {
		return nil
	}
	y := make([]float64, x.Numel())
	for i := range y {
		at, offset := int64(i), int64(0)
		for a := int(x.NDim) - 1; a >= 0; a-- {
			offset += at % x.Shape[a] * x.Stride[a]
			at /= x.Shape[a]
		}
		y[i] = float64(*(*float32)(unsafe.Add(x.Data, 4*offset)))
	}
	return y
}

// deltaError returns max|x - want| / max|want|, or infinity if it is NaN.
func deltaError(x, want []float64) float64 {
	worst, top := 0.0, 1e-30
	for i := range want {
		if d := math.Abs(x[i] - want[i]); !(d <= worst) {
			worst = d
		}
		top = max(top, math.Abs(want[i]))
	}
	if math.IsNaN(worst) {
		return math.Inf(1)
	}
	return worst / top
}

// deltaWant returns the results of the reference in a type, by name.
func deltaWant[T ref.Float](c *deltaCase, x *deltaData) map[string][]float64 {
	to := func(x []float32) []T {
		y := make([]T, len(x))
		for i, v := range x {
			y[i] = T(v)
		}
		return y
	}
	from := func(x []T) []float64 {
		y := make([]float64, len(x))
		for i, v := range x {
			y[i] = float64(v)
		}
		return y
	}
	q, k, v, g, beta, in, dout, dlast := to(x.q), to(x.k), to(x.v), to(x.g), to(x.beta), to(x.in), to(x.dout),
		to(x.dlast)
	out, last := ref.GatedDeltaForward(&c.GatedDelta, q, k, v, g, beta, in)
	b := ref.GatedDeltaBackward(&c.GatedDelta, q, k, v, g, beta, in, dout, dlast)
	if !c.perHead {
		b.DQ, b.DK = ref.KeySum(&c.GatedDelta, b.DQ), ref.KeySum(&c.GatedDelta, b.DK)
	}
	return map[string][]float64{"out": from(out), "state_out": from(last), "dq": from(b.DQ), "dk": from(b.DK),
		"dv": from(b.DV), "dg": from(b.DG),
		"dbeta": from(b.DBeta), "dstate_in": from(b.DState)}
}

func deltaGot(g *device.GatedDeltaGrad) map[string][]float64 {
	return map[string][]float64{"out": values(g.Out), "state_out": values(g.StateOut), "dq": values(g.DQ),
		"dk": values(g.DK), "dv": values(g.DV),
		"dg": values(g.DG), "dbeta": values(g.DBeta), "dstate_in": values(g.DStateIn)}
}

var deltaCases = map[string]deltaCase{
	"one": {GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 1, Dv: 1, Cu: cu(1), Scale: 1}, decay: 1},
	"plain": {GatedDelta: ref.GatedDelta{Hk: 2, Hv: 2, Dk: 32, Dv: 32, Cu: cu(200), Scale: .2, L2Norm: true},
		decay: .1},
	"odd": {GatedDelta: ref.GatedDelta{Hk: 1, Hv: 3, Dk: 19, Dv: 37, Cu: cu(131), Scale: 1, In: 1, Out: 1},
		decay: .3, headMajor: true},
	"documents": {GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 16, Dv: 24, Cu: cu(0, 1, 64, 0, 65, 3, 129, 0),
		Scale: .3, L2Norm: true, In: 4, Out: 5}, decay: 1},
	"small chunks": {GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 24, Dv: 8, Cu: cu(100, 17), Scale: .3, In: 2,
		Out: 2}, chunk: 16, decay: .2, headMajor: true},
	"uneven groups": {GatedDelta: ref.GatedDelta{Hk: 4, Hv: 4, Dk: 8, Dv: 48, Cu: cu(90), KeyHead: []int64{1, 1, 1, 2},
		Scale: .3, Out: 1}, decay: .2},
	"per head": {GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 40, Dv: 16, Cu: cu(33, 40), Scale: .3, L2Norm: true},
		decay: .2, perHead: true},
	"strong": {GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 32, Dv: 32, Cu: cu(150), Scale: .3, L2Norm: true,
		In: 1, Out: 1}, decay: 20},
	"wide": {GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 130, Dv: 100, Cu: cu(160), Scale: .1, L2Norm: true,
		Out: 1}, decay: .05},
}

func TestGatedDelta(t *testing.T) {
	for name, c := range deltaCases {
		x := c.data(1)
		want, plain := deltaWant[float64](&c, x), deltaWant[float32](&c, x)
		for _, isa := range ISAs() {
			d := open(t, isa, 2)
			if name == "uneven groups" {
				d = open(t, isa, 9)
			}
			g := c.make(t, d, x)
			bothDelta(t, d, g)
			for what, got := range deltaGot(g) {
				// the tolerances of the conformance suite
				if e, p := deltaError(got, want[what]),
					deltaError(plain[what], want[what]); !(e <= max(2*p, 4.0/(1<<23))) || !(e <= 2e-5) {
					t.Errorf("%s, %s: %s: error %.2e, the recurrence's in f32 %.2e", name, isa, what, e, p)
				}
			}
		}
	}
}

// With one feature, the gradient through the norm is 1e-6 of the incoming gradient. It has an error
// of at most 2e-5 as well, although the subtraction in F32 would leave only rounding errors.
func TestGatedDeltaOfOneFeature(t *testing.T) {
	c := deltaCase{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 1, Dv: 24, Cu: cu(1, 70), Scale: 1, L2Norm: true},
		decay: .3}
	x := c.data(1)
	want := deltaWant[float64](&c, x)
	for _, isa := range ISAs() {
		d := open(t, isa, 2)
		g := c.make(t, d, x)
		bothDelta(t, d, g)
		for what, got := range deltaGot(g) {
			if e := deltaError(got, want[what]); !(e <= 2e-5) {
				t.Errorf("%s: %s: error %.2e", isa, what, e)
			}
		}
	}
}

// Results are bitwise equal for any number of workers, with and without other heads, with PerHead,
// for any position of a document, and in each of many repetitions.
func TestGatedDeltaInvariance(t *testing.T) {
	c := deltaCase{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 32, Dv: 48, Cu: cu(37, 150), Scale: .3, L2Norm: true},
		decay: .3}
	x := c.data(1)
	of := func(g *device.GatedDeltaGrad) (all []float64) {
		for _, t := range []tensor.Tensor{g.Out, g.DQ, g.DK, g.DV, g.DG, g.DBeta} {
			all = append(all, values(t)...)
		}
		return all
	}
	for _, isa := range ISAs() {
		var want []float64
		for _, workers := range []int{1, 2, 7} { // with 7, tasks are value heads
			d := open(t, isa, workers)
			g := c.make(t, d, x)
			for range 34 {
				bothDelta(t, d, g)
				if got := of(g); want == nil {
					want = got
				} else if !slices.Equal(got, want) {
					t.Fatalf("%s: %d workers: the result differs from an earlier run", isa, workers)
				}
			}
			// The second document and the second key head alone.
			one := *g
			half := func(y tensor.Tensor, n int64) tensor.Tensor { return y.Slice(0, 37, 187).Slice(1, n/2, n) }
			before := append(append(append(values(half(g.Out, 4)), values(half(g.DQ, 2))...), values(half(g.DK, 2))...),
				values(half(g.DG, 4))...)
			one.Cu = cu(150)
			one.Q, one.K, one.DQ, one.DK = half(g.Q, 2), half(g.K, 2), half(g.DQ, 2), half(g.DK, 2)
			one.V, one.G, one.Beta, one.Out, one.DOut = half(g.V, 4), half(g.G, 4), half(g.Beta, 4), half(g.Out, 4),
				half(g.DOut, 4)
			one.DV, one.DG, one.DBeta = half(g.DV, 4), half(g.DG, 4), half(g.DBeta, 4)
			one.Workspace = bytes(t, d, d.GatedDeltaSizes(&one.GatedDelta).Backward)
			bothDelta(t, d, &one)
			if after := append(append(append(values(one.Out), values(one.DQ)...), values(one.DK)...),
				values(one.DG)...); !slices.Equal(before, after) {
				t.Fatalf("%s: the results of a document and a head depend on other documents or heads", isa)
			}
			// dq of each value head, added up.
			p := c
			p.perHead = true
			h := p.make(t, d, x)
			bothDelta(t, d, h)
			a := values(h.DQ)
			bothDelta(t, d, g)
			b := values(g.DQ)
			for i := range b {
				tk, head, e := int64(i)/(2*32), int64(i)/32%2, int64(i)%32
				at := (tk*4+2*head)*32 + e
				if s := float32(a[at]) + float32(a[at+32]); float64(s) != b[i] {
					t.Fatalf("%s: dq[%d] is %g, its value heads' sum %g", isa, i, b[i], s)
				}
			}
		}
	}
}

// A NaN affects its token and later tokens, and no earlier token.
func TestGatedDeltaNaN(t *testing.T) {
	c := deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 16, Dv: 16, Cu: cu(200), Scale: .3}, decay: .3}
	for _, isa := range ISAs() {
		d := open(t, isa, 1)
		for what := range 5 {
			x := c.data(1)
			nan := float32(math.NaN())
			for i, n := range map[int][]float32{0: x.q, 1: x.k, 2: x.v, 3: x.g, 4: x.beta} {
				if i == what {
					n[int64(90)*int64(len(n))/200] = nan
				}
			}
			g := c.make(t, d, x)
			bothDelta(t, d, g)
			for i := range int64(200) {
				if y := element(g.Out, i, 0, 0); math.IsNaN(y) != (i == 90 || i > 90 && what > 0) {
					t.Fatalf("%s: input %d: out[%d] = %g", isa, what, i, y)
				}
			}
			for name, y := range map[string]float64{"dq": element(g.DQ, 90, 0, 0), "dk": element(g.DK, 90, 0, 0)} {
				if what > 0 && !math.IsNaN(y) {
					t.Errorf("%s: input %d: %s of its token is %g", isa, what, name, y)
				}
			}
		}
		// All strengths of decay are exact, also over a whole chunk.
		for _, strong := range []float32{-20, -1e4, -3e38, float32(math.Inf(-1))} {
			x := c.data(1)
			for i := range x.g {
				if i%3 > 0 || i < 70 {
					x.g[i] = strong
				}
			}
			g := c.make(t, d, x)
			bothDelta(t, d, g)
			want := deltaWant[float64](&c, x)
			for name, got := range deltaGot(g) {
				if e := deltaError(got, want[name]); !(e <= 2e-6) {
					t.Errorf("%s: decays of %g: %s: error %.2e", isa, strong, name, e)
				}
			}
		}
	}
}

// The memory without given documents is enough for all documents.
func TestGatedDeltaBound(t *testing.T) {
	d := open(t, "", 5)
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		tokens, docs := 1+r.Int64N(3000), []int{1, 2, 3, 40}[r.IntN(4)]
		typ := []tensor.DType{tensor.F32, tensor.BF16}[r.IntN(2)]
		a := device.GatedDelta{K: tensor.Of(nil, typ, tokens, 1+r.Int64N(2), 1+r.Int64N(130)),
			V: tensor.Of(nil, typ, tokens, 4, 1+r.Int64N(130)), Chunk: r.Int64N(2) * 48}
		most := d.GatedDeltaSizes(&a)
		a.Cu = make([]int64, docs+1)
		for i := 1; i < docs; i++ {
			a.Cu[i] = a.Cu[i-1] + r.Int64N(tokens-a.Cu[i-1]+1)
		}
		a.Cu[docs] = tokens
		if n := d.GatedDeltaSizes(&a); n.Saved > most.Saved || n.Forward > most.Forward || n.Backward > most.Backward ||
			n.State > most.State {
			t.Fatalf("%d tokens, documents %v: %+v, bound %+v", tokens, a.Cu, n, most)
		}
	}
}

// DeltaState and DeltaStateGrad agree with the reference.
func TestDeltaState(t *testing.T) {
	c := deltaCase{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 24, Dv: 40, Cu: cu(150), Scale: .3, L2Norm: true},
		decay: .1, headMajor: true}
	x := c.data(1)
	state, transition := ref.DeltaState(&c.GatedDelta, wide(x.k), wide(x.v), wide(x.g), wide(x.beta))
	grad := ref.DeltaStateGrad(&c.GatedDelta, wide(x.q), wide(x.k), wide(x.g), wide(x.beta), wide(x.dout))
	for _, isa := range ISAs() {
		d := open(t, isa, 2)
		g := c.make(t, d, x)
		s := device.DeltaState{K: g.K, V: g.V, G: g.G, Beta: g.Beta, L2Norm: true, Workspace: g.Workspace,
			State:      tensor.OfFloat32(floats(t, d, 4*24*40), 4, 24, 40),
			Transition: tensor.OfFloat32(floats(t, d, 4*24*24), 4, 24, 24)}
		b := device.DeltaStateGrad{Q: g.Q, K: g.K, G: g.G, Beta: g.Beta, DOut: g.DOut, L2Norm: true, Scale: c.Scale,
			Workspace: g.Workspace,
			DState:    tensor.OfFloat32(floats(t, d, 4*24*40+1), 4, 24, 40)}
		if err := d.DeltaState(nil, &s); err != nil {
			t.Fatal(err)
		}
		if err := d.DeltaStateGrad(nil, &b); err != nil {
			t.Fatal(err)
		}
		for name, e := range map[string]float64{"state": deltaError(values(s.State), state),
			"transition": deltaError(values(s.Transition), transition),
			"dstate":     deltaError(values(b.DState), grad)} {
			if !(e <= 1e-6) {
				t.Errorf("%s: %s: error %.2e", isa, name, e)
			}
		}
	}
}
