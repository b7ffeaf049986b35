package conformance

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testDeltaLaws compares the bits of runs with each other, without a reference.
func testDeltaLaws(s *suite) {
	s.typed(func(d tensor.DType, suffix string) {
		for _, law := range []struct {
			name string
			test func(*testing.T, tensor.DType)
		}{
			{"gates of a head are independent of the others", s.gatesAlone},
			{"a channel is independent of the others", s.channelsAlone},
			{"a convolution is independent of other documents", s.convDocuments},
			{"a value head is independent of the others", s.valueHeadsAlone},
			{"gradients of key heads are sums over value heads", s.keyHeadSums},
			{"the rule is independent of other documents", s.deltaDocuments},
			{"the rule in another layout has the same bits", s.deltaLayoutsAgree},
			{"no token of the rule sees the future", s.deltaCausality},
			{"NaN in the rule shows, in its document and heads alone", s.deltaNaN},
			{"sizes without documents are bounds", s.deltaSizes},
		} {
			s.t.Run(law.name+suffix, func(t *testing.T) { law.test(t, d) })
		}
	})
}

// lawCases have value heads in uneven groups, and several documents.
func lawCases() []deltaCase {
	return []deltaCase{
		{GatedDelta: ref.GatedDelta{Hk: 3, Hv: 5, Dk: 16, Dv: 33, Cu: bounds(20, 0, 1, 70),
			KeyHead: []int64{0, 0, 1, 2, 2}, L2Norm: true, Scale: 0.3, In: 2, Out: 3}},
		{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 64, Dv: 16, Cu: bounds(65, 3), Scale: 0.2, In: 2, Out: 2},
			chunk: 16},
		{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 16, Cu: bounds(110, 30), L2Norm: true, Scale: 0.3, In: 2,
			Out: 2}, chunk: 16},
	}
}

func (s *suite) deltaBits(t *testing.T, c *deltaCase, x deltaInput, l layout) [][]byte {
	return s.bits(t, func(b *bench) ([]*array, error) { return b.delta(c, x, deltaLayouts{l, l, l}) })
}

// heads returns the bits of a range of value heads (axis 1) in a result with outer indices of axis
// 0. bytes is the size of one head at one index.
func (c *deltaCase) heads(bits []byte, result string, d tensor.DType, lo, n int64) []byte {
	width := map[string]int64{"out": d.Size() * c.Dv, "dv": d.Size() * c.Dv, "dq": d.Size() * c.Dk,
		"dk": d.Size() * c.Dk, "dg": 4, "dbeta": 4}[result]
	if width == 0 { // states
		width = 4 * c.Dk * c.Dv
	}
	return columns(bits, c.Hv*width, lo*width, n*width)
}

// valueHeadsAlone runs all heads, then some of them with their key head. Because the bits are
// equal, the rule is exact for any number of ranks.
func (s *suite) valueHeadsAlone(t *testing.T, d tensor.DType) {
	for _, c := range lawCases() {
		c.perHead, c.alone = true, true
		x := newDeltaInput(d, &c, seeded(54, c.Dk))
		all := s.deltaBits(t, &c, x, headMajor)
		for h := range c.Hv {
			n, key := int64(1), c.Key(h)
			if h+1 < c.Hv && c.Key(h+1) == key {
				n = 2
			}
			sub := c
			sub.Hk, sub.Hv, sub.KeyHead = 1, n, nil
			values := func(x []float64, width int64) []float64 { return columns(x, c.Hv*width, h*width, n*width) }
			keys := func(x []float64) []float64 { return columns(x, c.Hk*c.Dk, key*c.Dk, c.Dk) }
			alone := s.deltaBits(t, &sub,
				deltaInput{d, keys(x.q), keys(x.k), values(x.v, c.Dv), values(x.g, 1), values(x.beta, 1),
					values(x.in, c.Dk*c.Dv), values(x.dout, c.Dv), values(x.dlast, c.Dk*c.Dv)}, dense)
			for i, name := range c.names() {
				if !bytes.Equal(c.heads(all[i], name, d, h, n), alone[i]) {
					t.Errorf("%s of %d value heads from %d alone differs in bits from the run of %d heads (D %d %d)",
						name, n, h, c.Hv, c.Dk, c.Dv)
				}
			}
		}
	}
}

// keyHeadSums checks that dq and dk of a key head are the sums over its value heads, each rounded,
// in index order.
func (s *suite) keyHeadSums(t *testing.T, d tensor.DType) {
	for _, c := range lawCases() {
		x := newDeltaInput(d, &c, seeded(54, c.Dk))
		run := func(perHead bool) (dq, dk []float64) {
			c.perHead = perHead
			b := newBench(t, s.one)
			defer b.close()
			results, err := b.delta(&c, x, deltaLayouts{headMajor, headMajor, headMajor})
			try(t, err)
			b.finish()
			at := slices.Index(c.names(), "dq")
			return results[at].values(), results[at+1].values()
		}
		dq, dk := run(false)
		each, eachK := run(true)
		for name, pair := range map[string][2][]float64{"dq": {dq, each}, "dk": {dk, eachK}} {
			sum := rounded(d, ref.Convert[float64](ref.KeySum(&c.GatedDelta, ref.Convert[float32](pair[1]))))
			if !slices.Equal(pair[0], sum) {
				t.Errorf("%s is not the sum over its value heads (D %d %d)", name, c.Dk, c.Dv)
			}
		}
	}
}

// deltaDocuments runs packed documents, then each alone.
func (s *suite) deltaDocuments(t *testing.T, d tensor.DType) {
	for _, c := range lawCases() {
		c.In, c.Out, c.alone = c.Documents(), c.Documents(), true
		x := newDeltaInput(d, &c, seeded(55, c.Dk))
		packed := s.deltaBits(t, &c, x, headMajor)
		for i := range c.Documents() {
			lo, hi := c.Cu[i], c.Cu[i+1]
			sub := c
			sub.Cu, sub.In, sub.Out = one(hi-lo), 1, 1
			rows := func(x []float64, width int64) []float64 { return x[lo*width : hi*width] }
			state := func(x []float64) []float64 { return x[i*c.Hv*c.Dk*c.Dv:][:c.Hv*c.Dk*c.Dv] }
			alone := s.deltaBits(t, &sub,
				deltaInput{d, rows(x.q, c.Hk*c.Dk), rows(x.k, c.Hk*c.Dk), rows(x.v, c.Hv*c.Dv), rows(x.g, c.Hv),
					rows(x.beta, c.Hv), state(x.in), rows(x.dout, c.Hv*c.Dv), state(x.dlast)}, dense)
			for j, name := range c.names() {
				n := int64(len(packed[j]))
				from, to := n/c.T()*lo, n/c.T()*hi
				if name == "state out" || name == "dstate in" {
					from, to = n/c.Documents()*i, n/c.Documents()*(i+1)
				}
				if !bytes.Equal(packed[j][from:to], alone[j]) {
					t.Errorf("%s of document %d of %v alone differs in bits from the packed run", name, i, c.Cu)
				}
			}
		}
	}
}

func (s *suite) deltaLayoutsAgree(t *testing.T, d tensor.DType) {
	for _, c := range lawCases() {
		x := newDeltaInput(d, &c, seeded(56, c.Dk))
		first := s.deltaBits(t, &c, x, dense)
		for _, l := range []layout{shifted, padded, headMajor} {
			for i, bits := range s.deltaBits(t, &c, x, l) {
				if !bytes.Equal(bits, first[i]) {
					t.Errorf("%s differs in bits in layout %v", c.names()[i], l)
				}
			}
		}
		// The output has the same bits without Saved.
		alone := s.bits(t, func(b *bench) ([]*array, error) {
			l := deltaLayouts{dense, dense, dense}
			forward, y, _ := b.deltaGrad(b.deltaArgs(&c, x, l, false), &c, x, l)
			y.Workspace = b.out("workspace", tensor.U8, dense, b.dev.GatedDeltaSizes(&y.GatedDelta).Forward).Tensor
			return forward, b.dev.GatedDeltaForward(b.stream, &y.GatedDelta)
		})
		for i, bits := range alone {
			if !bytes.Equal(bits, first[i]) {
				t.Errorf("%s differs in bits if nothing is saved", c.names()[i])
			}
		}
	}
}

// deltaCausality changes q, k and v of a token: out of earlier tokens keeps its bits. Then it
// changes dout of a token: the gradients of later tokens, and all results of forward, keep their
// bits.
func (s *suite) deltaCausality(t *testing.T, d tensor.DType) {
	for _, c := range lawCases() {
		c.perHead = true
		x := newDeltaInput(d, &c, seeded(57, c.Dk))
		before := s.deltaBits(t, &c, x, headMajor)
		changed := func(x []float64, width, token int64) []float64 {
			y := slices.Clone(x)
			for i := range width {
				y[token*width+i] *= -2
			}
			return y
		}
		n := c.T()
		tokens := []int64{0, 19, 40, n - 2, n - 1}
		if s.emulated() {
			tokens = []int64{19, 40, n - 1}
		}
		for _, token := range tokens {
			y, z := x, x
			y.q, y.k, y.v = changed(x.q, c.Hk*c.Dk, token), changed(x.k, c.Hk*c.Dk, token),
				changed(x.v, c.Hv*c.Dv, token)
			z.dout = changed(x.dout, c.Hv*c.Dv, token)
			forward, backward := s.deltaBits(t, &c, y, headMajor), s.deltaBits(t, &c, z, headMajor)
			row := int64(len(before[0])) / n
			if !bytes.Equal(before[0][:token*row], forward[0][:token*row]) {
				t.Errorf("token %d changes out of earlier tokens", token)
			}
			if bytes.Equal(before[0][token*row:(token+1)*row], forward[0][token*row:(token+1)*row]) {
				t.Errorf("token %d does not change its out", token)
			}
			for i, name := range c.names() {
				from := len(before[i]) / int(n) * int(token+1)
				if name == "out" || name == "state out" {
					from = 0
				}
				if name != "dstate in" && !bytes.Equal(before[i][from:], backward[i][from:]) {
					t.Errorf("dout of token %d changes %s of later tokens", token, name)
				}
			}
		}
	}
}

// deltaNaN sets an element of each input to NaN, one after the other. The results must have NaN
// where the reference has it. NaN may spread within the document and the value heads of a key head,
// because whole chunks are multiplied, but no further.
func (s *suite) deltaNaN(t *testing.T, d tensor.DType) {
	c := deltaCase{GatedDelta: ref.GatedDelta{Hk: 2, Hv: 4, Dk: 16, Dv: 16, Cu: bounds(20, 70, 5), L2Norm: true,
		Scale: 0.3, In: 3, Out: 3}, perHead: true}
	g := &c.GatedDelta
	const token = 60 // of document 1
	for input, name := range []string{"q", "k", "v", "g", "beta", "dout", "state in", "dstate out"} {
		x := newDeltaInput(d, &c, seeded(58))
		state := c.Hv * c.Dk * c.Dv
		x.in, x.dlast = slices.Clone(x.in), slices.Clone(x.dlast)
		[][]float64{x.q, x.k, x.v, x.g, x.beta, x.dout, x.in,
			x.dlast}[input][[]int64{token*2*16 + 16 + 3, token*2*16 + 16 + 3, (token*4+2)*16 + 5, token*4 + 2,
			token*4 + 2, (token*4+2)*16 + 5, state + 2*c.Dk*c.Dv + 7, state + 2*c.Dk*c.Dv + 7}[input]] = math.NaN()
		out, last := ref.GatedDeltaForward(g, x.q, x.k, x.v, x.g, x.beta, x.in)
		y := ref.GatedDeltaBackward(g, x.q, x.k, x.v, x.g, x.beta, x.in, x.dout, x.dlast)
		b := newBench(t, s.one)
		results, err := b.delta(&c, x, deltaLayouts{headMajor, headMajor, headMajor})
		try(t, err)
		b.finish()
		for i, want := range [][]float64{out, last, y.DQ, y.DK, y.DV, y.DG, y.DBeta, y.DState} {
			got, rows := results[i].values(), c.T()
			of := func(row int64) bool { return row >= c.Cu[1] && row < c.Cu[2] }
			if result := c.names()[i]; result == "state out" || result == "dstate in" {
				rows, of = c.Documents(), func(row int64) bool { return row == 1 }
			}
			width := int64(len(want)) / rows
			for at, v := range want {
				row, head := int64(at)/width, int64(at)%width/(width/c.Hv)
				if math.IsNaN(v) && !math.IsNaN(got[at]) || math.IsNaN(got[at]) && !(of(row) && head >= 2) {
					t.Errorf("NaN in %s: token %d, head %d of %s is %v, want %v", name, row, head, c.names()[i],
						got[at], v)
					break
				}
			}
		}
		b.close()
	}
}

// deltaSizes checks that the sizes for any documents are at least the sizes for given documents.
func (s *suite) deltaSizes(t *testing.T, d tensor.DType) {
	b := newBench(t, s.one)
	defer b.close()
	for _, cu := range [][]int64{one(130), bounds(65, 65), bounds(1, 0, 64, 65, 0),
		bounds(slices.Repeat([]int64{1, 1, 0}, 44)[:130]...), one(0)} {
		for _, chunk := range []int64{0, 16, 64} {
			c := deltaCase{GatedDelta: ref.GatedDelta{Hk: 1, Hv: 2, Dk: 16, Dv: 20, Cu: cu, Scale: 1, In: 1, Out: 1},
				chunk: chunk}
			a := b.deltaArgs(&c, newDeltaInput(d, &c, seeded(59)), deltaLayouts{}, false)
			a.Out = a.V
			some := b.dev.GatedDeltaSizes(a)
			a.Cu = nil
			any := b.dev.GatedDeltaSizes(a)
			if any.Saved < some.Saved || any.Forward < some.Forward || any.Backward < some.Backward ||
				any.State < some.State {
				t.Errorf("%v, chunk %d: the sizes for any documents are %+v, for these %+v", cu, chunk, any, some)
			}
		}
	}
}
