package conformance

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// deltaCase is a call of the gated delta rule, with the shapes of the reference.
type deltaCase struct {
	ref.GatedDelta
	chunk   int64
	panel   int64
	perHead bool
	alone   bool // Deterministic: compared with calls with other heads or documents
	decay   int  // of decayKinds
	beta    int  // of betaKinds
	similar bool // the keys of a head differ little, and so the rows of a chunk's matrix
}

// decayKinds are distributions of the logarithms of decays: as in trained layers, none, some
// strong, all strong, strong between weak (differences of large cumulative sums are small), a decay
// of 24 to 25 per token in every other head, and infinite or huge at some tokens.
var decayKinds = []struct {
	name string
	g    func(r *rand.Rand, head int64) float64
}{
	{"", func(r *rand.Rand, _ int64) float64 { return -0.3 * math.Abs(r.NormFloat64()) }},
	{"zero", func(*rand.Rand, int64) float64 { return 0 }},
	{"strong", func(r *rand.Rand, _ int64) float64 { return -20 * r.Float64() }},
	{"all -20", func(*rand.Rand, int64) float64 { return -20 }},
	{"bursts", func(r *rand.Rand, _ int64) float64 { return []float64{-20, -20, -0.05 * r.Float64()}[r.IntN(3)] }},
	{"-24 in odd heads", func(r *rand.Rand, head int64) float64 {
		if head%2 == 1 {
			return -24 - r.Float64()
		}
		return -0.3 * math.Abs(r.NormFloat64())
	}},
	{"resets", func(r *rand.Rand, _ int64) float64 {
		return []float64{math.Inf(-1), -1e30, -0.05 * r.Float64()}[min(r.IntN(20), 2)]
	}},
}

var betaKinds = []struct {
	name string
	beta func(r *rand.Rand) float64
}{
	{"", func(r *rand.Rand) float64 { return r.Float64() }},
	{"zero", func(*rand.Rand) float64 { return 0 }},
	{"one", func(*rand.Rand) float64 { return 1 }},
	{"0 and 1", func(r *rand.Rand) float64 { return float64(r.IntN(2)) }},
}

func (c *deltaCase) String() string {
	s := fmt.Sprintf("%d of %d heads, D %d %d, %v, key heads %v, chunk %d, states %d in %d out", c.Hv, c.Hk, c.Dk, c.Dv,
		listed(c.Cu), c.KeyHead, c.chunk, c.In, c.Out)
	if c.L2Norm {
		s += ", normal"
	}
	if c.perHead {
		s += ", per head"
	}
	if c.decay > 0 {
		s += ", decay " + decayKinds[c.decay].name
	}
	if c.beta > 0 {
		s += ", beta " + betaKinds[c.beta].name
	}
	if c.similar {
		s += ", similar keys"
	}
	if c.panel > 0 {
		s += fmt.Sprintf(", panel %d", c.panel)
	}
	return s
}

// deltaInput has the values of a case, activations rounded to type d.
type deltaInput struct {
	d                                 tensor.DType
	q, k, v, g, beta, in, dout, dlast []float64
}

// newDeltaInput returns random values. Keys have at most length 1 if the call does not normalize
// them: otherwise states would grow without bound.
func newDeltaInput(d tensor.DType, c *deltaCase, r *rand.Rand) deltaInput {
	n, states := c.T(), c.Hv*c.Dk*c.Dv
	x := deltaInput{d: d, q: normalAs(d, r, n*c.Hk*c.Dk), k: normal(r, n*c.Hk*c.Dk), v: normalAs(d, r, n*c.Hv*c.Dv),
		g: make([]float64, n*c.Hv), beta: make([]float64, n*c.Hv), in: normal(r, c.In*states),
		dout: normalAs(d, r, n*c.Hv*c.Dv), dlast: normal(r, c.Out*states)}
	for i := c.Hk * c.Dk; i < int64(len(x.k)) && c.similar; i++ {
		x.k[i] = x.k[i%(c.Hk*c.Dk)] + 0.03*x.k[i]
	}
	for at := int64(0); at < int64(len(x.k)) && !c.L2Norm; at += c.Dk {
		key := x.k[at:][:c.Dk]
		by := (1 - r.Float64()/2) / math.Sqrt(ref.SumSquares(key))
		for i := range key {
			key[i] = float64(float32(key[i] * by))
		}
	}
	x.k = rounded(d, x.k)
	for i := range x.g {
		x.g[i], x.beta[i] = float64(float32(decayKinds[c.decay].g(r, int64(i)%c.Hv))),
			float64(float32(betaKinds[c.beta].beta(r)))
	}
	return x
}

// deltaLayouts are the layouts of a case's activations. Decays and betas always have other strides
// than dense ones.
type deltaLayouts struct{ q, k, v layout }

var tokensLast = layout{order: []int{1, 0}, gap: 1, shift: 1} // [T, H] as [H, T]

// deltaArgs allocates what both directions read, and Saved if a backward call follows.
func (b *bench) deltaArgs(c *deltaCase, x deltaInput, l deltaLayouts, saved bool) *device.GatedDelta {
	n := c.T()
	a := &device.GatedDelta{Q: b.in("q", x.d, l.q, x.q, n, c.Hk, c.Dk).Tensor,
		K: b.in("k", x.d, l.k, x.k, n, c.Hk, c.Dk).Tensor, V: b.in("v", x.d, l.v, x.v, n, c.Hv, c.Dv).Tensor,
		G:    b.in("g", tensor.F32, tokensLast, x.g, n, c.Hv).Tensor,
		Beta: b.in("beta", tensor.F32, layout{inner: 2, gap: 3}, x.beta, n, c.Hv).Tensor,
		Cu:   c.Cu, KeyHead: c.KeyHead, L2Norm: c.L2Norm, Scale: c.Scale, Chunk: c.chunk, Panel: c.panel,
		Deterministic: c.alone}
	if c.In > 0 || c.perHead { // a state of 0 documents is the same as nil
		a.StateIn = b.in("state in", tensor.F32, dense, x.in, c.In, c.Hv, c.Dk, c.Dv).Tensor
	}
	if saved {
		a.Saved = b.out("saved", tensor.U8, dense, b.dev.GatedDeltaSizes(a).Saved).Tensor
	}
	return a
}

// deltaGrad allocates the results, and what only backward reads. The results are, forward, out and
// the states if there are any; backward, dq, dk, dv, dg, dbeta and the states' gradients if there
// are any.
func (b *bench) deltaGrad(a *device.GatedDelta, c *deltaCase, x deltaInput, l deltaLayouts) (forward []*array,
	y *device.GatedDeltaGrad, backward []*array) {
	n, keys := c.T(), c.Hk
	if c.perHead {
		keys = c.Hv
	}
	out := b.out("out", x.d, l.v, n, c.Hv, c.Dv)
	forward, a.Out = []*array{out}, out.Tensor
	dq, dk, dv := b.out("dq", x.d, l.k, n, keys, c.Dk), b.out("dk", x.d, l.q, n, keys, c.Dk),
		b.out("dv", x.d, l.v, n, c.Hv, c.Dv)
	dg, dbeta := b.out("dg", tensor.F32, padded, n, c.Hv), b.out("dbeta", tensor.F32, tokensLast, n, c.Hv)
	backward = []*array{dq, dk, dv, dg, dbeta}
	y = &device.GatedDeltaGrad{DOut: b.in("dout", x.d, l.v, x.dout, n, c.Hv, c.Dv).Tensor,
		DQ: dq.Tensor, DK: dk.Tensor, DV: dv.Tensor, DG: dg.Tensor, DBeta: dbeta.Tensor, PerHead: c.perHead}
	if c.Out > 0 {
		last := b.out("state out", tensor.F32, dense, c.Out, c.Hv, c.Dk, c.Dv)
		forward, a.StateOut = append(forward, last), last.Tensor
		y.DStateOut = b.in("dstate out", tensor.F32, dense, x.dlast, c.Out, c.Hv, c.Dk, c.Dv).Tensor
	}
	if c.In > 0 {
		dstate := b.out("dstate in", tensor.F32, dense, c.In, c.Hv, c.Dk, c.Dv)
		backward, y.DStateIn = append(backward, dstate), dstate.Tensor
	}
	y.GatedDelta = *a
	return forward, y, backward
}

// delta runs forward and backward and returns the results of both.
func (b *bench) delta(c *deltaCase, x deltaInput, l deltaLayouts) ([]*array, error) {
	forward, y, backward := b.deltaGrad(b.deltaArgs(c, x, l, true), c, x, l)
	sizes := b.dev.GatedDeltaSizes(&y.GatedDelta)
	y.Workspace = b.out("workspace", tensor.U8, dense, sizes.Forward).Tensor
	if err := b.dev.GatedDeltaForward(b.stream, &y.GatedDelta); err != nil {
		return nil, err
	}
	y.Workspace = b.out("workspace of backward", tensor.U8, dense, sizes.Backward).Tensor
	return append(forward, backward...), b.dev.GatedDeltaBackward(b.stream, y)
}

// names returns the names of delta's results.
func (c *deltaCase) names() []string {
	names := []string{"out"}
	if c.Out > 0 {
		names = append(names, "state out")
	}
	if names = append(names, "dq", "dk", "dv", "dg", "dbeta"); c.In > 0 {
		names = append(names, "dstate in")
	}
	return names
}

// plain calls f for the call as plain implementations compute it in type d, and returns the results
// with the largest errors, element by element. One in BF16 keeps values in BF16 between operations,
// and may be exact by chance in small cases. Therefore there are three in BF16, with v, dout and
// the states times a factor each, by which their results are divided: `powers` has the powers of
// the factor in the results.
func (c *deltaCase) plain(d tensor.DType, refs [][]float64, powers []int,
	f func(g *ref.GatedDelta, by float32) [][]float32) [][]float64 {
	g, factors := c.GatedDelta, []float32{1}
	if d == tensor.BF16 {
		g.Keep = func(v float64) float64 { return float64(tensor.BF16ToF32(tensor.F32ToBF16(float32(v)))) }
		factors = []float32{1, 1.25, 1.6}
	}
	var worst [][]float64
	for _, by := range factors {
		for i, result := range f(&g, by) {
			if len(worst) <= i {
				worst = append(worst, ref.Convert[float64](result))
				continue
			}
			for j, v := range result {
				x, r := float64(v)/math.Pow(float64(by), float64(powers[i])), refs[i][j]
				if nearer := math.Abs(x-r) - math.Abs(worst[i][j]-r); !(nearer <= 0) {
					worst[i][j] = x
				}
			}
		}
	}
	return worst
}

// times returns x in F32, times a factor.
func times(by float32, x []float64) []float32 {
	y := ref.Convert[float32](x)
	for i := range y {
		y[i] *= by
	}
	return y
}

// deltaChain is the error of a chain of 12 roundings: sum of decays, its exponential, product with
// the state, difference, beta, the previous tokens of the chunk, product with a key, decay of the
// state, product with a query, scale, sum over values, sum over heads.
const deltaChain = 12 * ulp

// deltaWants caches the references by case. They take long and are the same for every device.
var deltaWants sync.Map

func deltaWant(name string, c *deltaCase, x deltaInput) []want {
	if w, ok := deltaWants.Load(name); ok {
		return w.([]want)
	}
	g := &c.GatedDelta
	out, last := ref.GatedDeltaForward(g, x.q, x.k, x.v, x.g, x.beta, x.in)
	y := ref.GatedDeltaBackward(g, x.q, x.k, x.v, x.g, x.beta, x.in, x.dout, x.dlast)
	keySum := func(z []float64) []float64 {
		if c.perHead {
			return z
		}
		return ref.KeySum(g, z)
	}
	refs := [][]float64{out, last, keySum(y.DQ), keySum(y.DK), y.DV, y.DG, y.DBeta, y.DState}
	plain := c.plain(x.d, refs, []int{1, 1, 2, 2, 1, 2, 2, 1}, func(g *ref.GatedDelta, by float32) [][]float32 {
		q, k, v, decay, beta := times(1, x.q), times(1, x.k), times(by, x.v), times(1, x.g), times(1, x.beta)
		in, dout, dlast := times(by, x.in), times(by, x.dout), times(by, x.dlast)
		out, last := ref.GatedDeltaForward(g, q, k, v, decay, beta, in)
		y := ref.GatedDeltaBackward(g, q, k, v, decay, beta, in, dout, dlast)
		low := func(z []float32) []float32 { return ref.Convert[float32](rounded(x.d, ref.Convert[float64](z))) }
		dq, dk := y.DQ, y.DK
		if !c.perHead { // of each value head's, rounded
			dq, dk = ref.KeySum(g, low(dq)), ref.KeySum(g, low(dk))
		}
		return [][]float32{low(out), last, low(dq), low(dk), low(y.DV), y.DG, y.DBeta, y.DState}
	})
	at := func(i int, name string) want {
		rounds := x.d == tensor.BF16
		bf16 := rounds && i != 1 && i < 5
		return want{name: name, ref: refs[i], plain: plain[i], bf16: bf16, rounds: rounds && !bf16}
	}
	w := []want{at(0, "out")}
	if c.Out > 0 {
		w = append(w, at(1, "state out"))
	}
	for i, name := range []string{"dq", "dk", "dv", "dg", "dbeta"} {
		w = append(w, at(2+i, name))
	}
	if c.In > 0 {
		w = append(w, at(7, "dstate in"))
	}
	for i := range w {
		w[i].chain = deltaChain
		if w[i].gate = 2e-2; i == 0 {
			w[i].gate = 1e-2
		}
		if w[i].name == "dg" || w[i].name == "dbeta" {
			// the products of a token's gradient may almost cancel in a head of few tokens
			w[i].heads, w[i].gate = c.Hv, 5e-2
		}
	}
	deltaWants.Store(name, w)
	return w
}

// deltaWidths returns cases of head sizes.
func deltaWidths() (cases []deltaCase) {
	add := func(c deltaCase) { cases = append(cases, c) }
	for i, d := range [][2]int64{{1, 1}, {1, 5}, {5, 1}, {16, 16}, {5, 16}, {16, 100}, {64, 64}, {100, 64}, {64, 100},
		{128, 128}, {100, 5}, {33, 17}} {
		n := []int64{35, 66, 20}[i%3]
		add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1 + int64(i%3), Dk: d[0], Dv: d[1], Cu: one(n),
			L2Norm: i%2 == 0, In: int64(i % 2), Out: int64(i / 2 % 2)}})
	}
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 256, Dv: 256, Cu: one(18), L2Norm: true, In: 1, Out: 1}})
	return scaled(cases)
}

// scaled sets the scales of cases by their place.
func scaled(cases []deltaCase) []deltaCase {
	for i := range cases {
		cases[i].Scale = []float64{1, 0.7, 1.5, 0.3}[i%4] / math.Sqrt(float64(cases[i].Dk))
	}
	return cases
}

// deltaCases are the cases of testGatedDelta.
func deltaCases() []deltaCase {
	cases := deltaWidths()
	add := func(c deltaCase) { cases = append(cases, c) }
	small := func(cu []int64, in, out int64) ref.GatedDelta {
		return ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 16, Cu: cu, L2Norm: true, In: in, Out: out}
	}
	// lengths around the lengths of chunks
	for i, n := range []int64{1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200} {
		add(deltaCase{GatedDelta: small(one(n), int64(i%2), int64(1-i%2)), chunk: []int64{0, 16, 64}[i%3]})
	}
	for i, cu := range [][]int64{bounds(1, 1, 1), bounds(1, 0, 1, 0, 0, 1), bounds(15, 16, 17), bounds(63, 64, 65),
		bounds(0, 33), bounds(5, 1, 0, 64, 33, 1, 1, 20, 0), bounds(0), {0}, bounds(0, 0, 0)} {
		n := int64(len(cu)) - 1
		for _, states := range [][2]int64{{0, 0}, {min(1, n), min(1, n)}, {n, n}, {0, n}, {min(2, n), 0}} {
			add(deltaCase{GatedDelta: small(cu, states[0], states[1]), chunk: []int64{64, 0, 16}[i%3],
				perHead: i%2 == 0})
		}
	}
	// few heads and long documents: a GPU may divide them into segments
	for i, cu := range [][]int64{one(400), bounds(250, 3, 120), bounds(5, 330, 0, 90, 17), bounds(40, 40, 40, 300)} {
		n := int64(len(cu)) - 1
		for hv := range int64(3) {
			add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1 + hv, Dk: []int64{16, 33, 56}[hv], Dv: 16, Cu: cu,
				L2Norm: true, In: n * (hv % 2), Out: n}, chunk: 16, panel: []int64{0, 80, 1}[(i+int(hv))%3],
				perHead: i%2 == 0})
		}
	}
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 128, Dv: 64, Cu: bounds(700, 100), L2Norm: true, In: 2,
		Out: 2}})
	many := make([]int64, 60) // documents
	for i := range many {
		many[i] = int64(i % 4)
	}
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 6, Dv: 5, Cu: bounds(many...), L2Norm: true, In: 60,
		Out: 60}})
	for decay := range decayKinds { // and betas, with and without a state before
		for beta := range betaKinds {
			for _, in := range []int64{0, 1} {
				if decay+beta > 0 {
					add(deltaCase{GatedDelta: small(bounds(70, 3), in, in), decay: decay, beta: beta})
				}
			}
		}
	}
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 64, Dv: 64, Cu: one(130), L2Norm: true, In: 1, Out: 1},
		decay: 4})
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 64, Dv: 64, Cu: one(130), In: 1, Out: 1}, decay: 1,
		beta: 2})
	for _, perHead := range []bool{false, true} { // value heads of a key head
		for _, heads := range [][]int64{{0, 0, 0, 1}, {1, 1, 3}, {2}, {}} {
			add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 4, Hv: int64(len(heads)), Dk: 20, Dv: 12, Cu: bounds(40, 7),
				KeyHead: heads, L2Norm: true, In: 1, Out: 1}, perHead: perHead})
		}
		for _, heads := range [][2]int64{{2, 2}, {2, 4}, {2, 6}} {
			add(deltaCase{GatedDelta: ref.GatedDelta{Hk: heads[0], Hv: heads[1], Dk: 12, Dv: 20, Cu: bounds(40, 7),
				L2Norm: perHead, In: 2, Out: 1}, perHead: perHead})
		}
	}
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 64, Dv: 64, Cu: bounds(130, 48), L2Norm: true, In: 1,
		Out: 1}, decay: 1, similar: true})
	add(deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 1, Dk: 160, Dv: 20, Cu: one(200), L2Norm: true, In: 1, Out: 1}})
	return scaled(cases)
}

func testGatedDelta(s *suite) {
	for i, c := range deltaCases() {
		if s.few && c.Dk <= 64 {
			continue
		}
		l := []deltaLayouts{{headMajor, padded, headMajor}, {dense, dense, padded}, {padded, headMajor, dense},
			{shifted, shifted, shifted}}[i%4]
		s.typed(func(d tensor.DType, suffix string) {
			s.deltaCase(d, fmt.Sprint(&c, suffix), &c, l)
		})
	}
}

func testDeltaWidths(s *suite) {
	for _, c := range deltaWidths() {
		s.typed(func(d tensor.DType, suffix string) {
			s.deltaCase(d, fmt.Sprint(&c, suffix), &c, deltaLayouts{padded, headMajor, padded})
		})
	}
}

func (s *suite) deltaCase(d tensor.DType, name string, c *deltaCase, l deltaLayouts) {
	x := newDeltaInput(d, c, seeded(50, c.T(), c.Hv, c.Dk, c.Dv))
	s.check(name, deltaWant(name, c, x), func(b *bench) ([]*array, error) { return b.delta(c, x, l) })
}
