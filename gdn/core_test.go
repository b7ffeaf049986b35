package gdn

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/sp"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/ref"
)

// coreRun is a plan, a batch and the tensors of this rank.
type coreRun struct {
	*bench
	p *Plan
	x *sp.Batch
	a Args
	g Grads
}

// prepare returns a run of a case with its inputs. All tensors but states have gaps.
func prepare(b *bench, k *testCase, states, scan bool) *coreRun {
	r := &coreRun{bench: b}
	r.p, r.x = b.plan(k, scan)
	l, n, rows, size := r.p.Layer(), k.batch.Batch, r.x.Rows(), r.p.Sizes(r.x)
	keys := func() tensor.Tensor { return b.gapped(l.DType, n, rows, l.KeyHeads, l.KeyDim) }
	values := func() tensor.Tensor { return b.gapped(l.DType, n, rows, l.ValueHeads, l.ValueDim) }
	gate := func() tensor.Tensor { return b.gapped(tensor.F32, n, rows, l.ValueHeads, 1).Select(3, 0) }
	r.a = Args{Q: keys(), K: keys(), V: values(), G: gate(), Beta: gate(), Out: values(), Saved: b.bytes(size.Saved),
		Workspace: b.bytes(size.Workspace)}
	r.g = Grads{DOut: values(), DQ: keys(), DK: keys(), DV: values(), DG: gate(), DBeta: gate()}
	for name, t := range map[uint64]tensor.Tensor{nameQ: r.a.Q, nameK: r.a.K, nameV: r.a.V, nameG: r.a.G,
		nameBeta: r.a.Beta, nameDOut: r.g.DOut} {
		b.put(t, r.x.Lo(), k.input(name))
	}
	if states {
		cu, _ := r.x.Documents()
		docs := int64(len(cu) - 1)
		state := func() tensor.Tensor { return b.dense(tensor.F32, docs, l.ValueHeads, l.KeyDim, l.ValueDim) }
		r.a.StateIn, r.a.StateOut, r.g.DStateOut, r.g.DStateIn = state(), state(), state(), state()
		b.put(r.a.StateIn, 0, k.input(nameStateIn))
		b.put(r.g.DStateOut, 0, k.input(nameDStateOut))
	}
	return r
}

func (r *coreRun) run() error {
	if err := r.p.Forward(r.stream, r.x, &r.a); err != nil {
		return err
	}
	return r.p.Backward(r.stream, r.x, &r.a, &r.g)
}

// result is a result of a call and its name. whole: all ranks have the whole tensor.
type result struct {
	name  string
	t     tensor.Tensor
	whole bool
}

func (r *coreRun) results() []result {
	x := []result{{"out", r.a.Out, false}, {"dq", r.g.DQ, false}, {"dk", r.g.DK, false}, {"dv", r.g.DV, false},
		{"dg", r.g.DG, false}, {"dbeta", r.g.DBeta, false}}
	if !r.a.StateIn.IsNil() {
		x = append(x, result{"state_out", r.a.StateOut, true}, result{"dstate_in", r.g.DStateIn, true})
	}
	return x
}

// references caches the results in float64 by case and type.
var references sync.Map

type lazy struct {
	once sync.Once
	x    map[string][]float64
}

// reference returns the results of the whole batch in float64.
func (r *coreRun) reference(k *testCase) map[string][]float64 {
	states := !r.a.StateIn.IsNil()
	entry, _ := references.LoadOrStore(fmt.Sprint("core ", k.name, r.p.layer.DType, states), new(lazy))
	e := entry.(*lazy)
	e.once.Do(func() { e.x = k.reference(r.p.layer, r.x, states, nil) })
	return e.x
}

// plainErrors returns max|Δ|/max|ref| of the results of a plain implementation, which keeps its
// values in BF16 between operations.
func (r *coreRun) plainErrors(k *testCase) map[string]float64 {
	return errorsOf(r.results(), r.reference(k), k.reference(r.p.layer, r.x, !r.a.StateIn.IsNil(), inBF16))
}

// inBF16 rounds a value to BF16.
func inBF16(v float64) float64 { return float64(round(tensor.BF16, float32(v))) }

// errorsOf returns max|Δ|/max|ref| of results that a plain implementation has computed.
func errorsOf(results []result, exact, plain map[string][]float64) map[string]float64 {
	errors := map[string]float64{}
	for _, x := range results {
		var delta, top float64
		for i, v := range exact[x.name] {
			y := plain[x.name][i]
			if x.t.DType == tensor.BF16 {
				y = inBF16(y)
			}
			delta, top = max(delta, math.Abs(y-v)), max(top, math.Abs(v))
		}
		if top > 0 {
			errors[x.name] = delta / top
		}
	}
	return errors
}

// whole returns the elements of a global input, tokens before heads.
func (k *testCase) whole(name uint64, dtype tensor.DType, shape ...int64) (x []float64) {
	t := tensor.OfFloat32(make([]float32, tensor.Of(nil, tensor.F32, shape...).Numel()), shape...)
	for t.NDim < 4 {
		t = t.View(append(t.Dims(), 1)...)
	}
	f := k.input(name)
	each(t, func(i [4]int64, _ *float32) { x = append(x, float64(round(dtype, f(i)))) })
	return x
}

func (k *testCase) geometry(l Layer, x *sp.Batch, states bool) *ref.GatedDelta {
	cu, _ := x.Documents()
	g := &ref.GatedDelta{Hk: l.KeyHeads, Hv: l.ValueHeads, Dk: l.KeyDim, Dv: l.ValueDim, Cu: cu, L2Norm: l.L2Norm,
		Scale: l.Scale}
	if states {
		g.In, g.Out = g.Documents(), g.Documents()
	}
	return g
}

// reference returns the results of the whole batch. keep: ref.GatedDelta.Keep.
func (k *testCase) reference(l Layer, x *sp.Batch, states bool, keep func(float64) float64) map[string][]float64 {
	b, s, f32 := x.Batch(), x.Seq(), tensor.F32
	g := k.geometry(l, x, states)
	g.Keep = keep
	docs := g.Documents()
	q, key := k.whole(nameQ, l.DType, b, s, l.KeyHeads, l.KeyDim), k.whole(nameK, l.DType, b, s, l.KeyHeads, l.KeyDim)
	v, dout := k.whole(nameV, l.DType, b, s, l.ValueHeads, l.ValueDim),
		k.whole(nameDOut, l.DType, b, s, l.ValueHeads, l.ValueDim)
	decay, beta := k.whole(nameG, f32, b, s, l.ValueHeads), k.whole(nameBeta, f32, b, s, l.ValueHeads)
	var in, dlast []float64
	if states {
		in = k.whole(nameStateIn, f32, docs, l.ValueHeads, l.KeyDim, l.ValueDim)
		dlast = k.whole(nameDStateOut, f32, docs, l.ValueHeads, l.KeyDim, l.ValueDim)
	}
	out, last := ref.GatedDeltaForward(g, q, key, v, decay, beta, in)
	d := ref.GatedDeltaBackward(g, q, key, v, decay, beta, in, dout, dlast)
	return map[string][]float64{"out": out, "dq": ref.KeySum(g, d.DQ), "dk": ref.KeySum(g, d.DK), "dv": d.DV,
		"dg": d.DG, "dbeta": d.DBeta,
		"state_out": last, "dstate_in": d.DState}
}

// near returns an error if max|Δ|/max|ref| of a rank's results exceeds the limit. Absolute errors
// up to the rounding of 1 are always allowed, because gradients that are zero except for rounding
// have no scale.
func near(b *bench, x *sp.Batch, results []result, exact map[string][]float64, limit float64) error {
	for _, y := range results {
		rows, lo := x.Seq(), x.Lo()
		if y.whole {
			rows, lo = y.t.Shape[1], 0
		}
		delta, top := far(b.host(y.t), exact[y.name], rows, lo)
		if allowed := max(limit*top, 1.0/(1<<23)); !(delta <= allowed) {
			return fmt.Errorf("%s: error %.3g, largest value %.3g", y.name, delta, top)
		}
	}
	return nil
}

// sweep is the set of cases, devices and types of a test. It runs on every number of ranks, with
// even and with given shards.
type sweep struct {
	kinds    []devicetest.Kind
	dtypes   []tensor.DType
	cases    []string
	strategy Strategy // Auto = both, State in both of its forms
	most     int      // ranks; 0 = any
	brief    bool     // an even cut alone, and states in their first form
}

func (w sweep) run(t *testing.T, f func(b *bench, k *testCase, scan bool) error) {
	if w.kinds == nil {
		w.kinds = []devicetest.Kind{host}
	}
	if w.dtypes == nil {
		w.dtypes = []tensor.DType{tensor.F32}
	}
	for _, kind := range w.kinds {
		for _, k := range cases {
			for _, way := range strategies {
				if w.strategy != Auto && w.strategy != way.strategy || w.cases != nil &&
					!slices.Contains(w.cases, k.name) {
					continue
				}
				t.Run(fmt.Sprint(kind.Name, "/", k.name, "/", way.name), func(t *testing.T) {
					for _, n := range mpitest.Sizes() {
						for _, dtype := range w.dtypes {
							for _, given := range []bool{false, true} {
								if w.most > 0 && n > w.most || n == 1 && (way.scan || given) || w.brief &&
									(given || way.scan) {
									continue
								}
								k := k
								k.layer.Strategy, k.layer.DType = way.strategy, dtype
								if given {
									k.batch.Rows = rowsOf(k.batch.Seq, n)
								}
								mpitest.Ranks(t, n, func(c comm.Comm) error {
									b := open(kind, c)
									if err := f(b, &k, way.scan); err != nil {
										return fmt.Errorf("rows given %v, %v: %w", given, dtype, err)
									}
									b.close()
									return nil
								})
							}
						}
					}
				})
			}
		}
	}
}

// All results are within 2e-5 of the recurrence in float64, with and without states of documents,
// and the bytes sent are the predicted ones.
func TestCoreAgainstFloat64(t *testing.T) {
	sweep{}.run(t, func(b *bench, k *testCase, scan bool) error {
		for _, states := range []bool{false, true} {
			r := prepare(b, k, states, scan)
			forward, backward := r.p.BytesSent(r.x)
			if states {
				more, back := r.p.StateBytesSent(r.x)
				forward, backward = forward+more, backward+back
			}
			before := b.sent()
			must(r.p.Forward(b.stream, r.x, &r.a))
			between := b.sent()
			must(r.p.Backward(b.stream, r.x, &r.a, &r.g))
			after := b.sent()
			if err := near(b, r.x, r.results(), r.reference(k), 2e-5); err != nil {
				return fmt.Errorf("states %v: %w", states, err)
			}
			must(r.p.Recompute(b.stream, r.x, &r.a))
			if between-before != forward || after-between != backward || b.sent()-after != r.p.RecomputeBytesSent(r.x) {
				return fmt.Errorf("states %v: sent %d, %d and %d bytes, predicted %d, %d and %d", states,
					between-before, after-between, b.sent()-after, forward, backward, r.p.RecomputeBytesSent(r.x))
			}
		}
		return b.gapsIntact()
	})
}
