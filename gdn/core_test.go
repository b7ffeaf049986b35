package gdn

import (
	"fmt"
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

// coreRun is a plan, a batch and their tensors: this rank's rows, or all rows when the communicator
// has one rank.
type coreRun struct {
	*bench
	p *Plan
	x *sp.Batch
	a Args
	g Grads
}

// prepare fills the tensors of a case, with gaps in all but states.
func prepare(b *bench, k *kase, states, scan bool) *coreRun {
	r := &coreRun{bench: b}
	var err error
	r.p, err = NewPlan(b.dev, b.comm, k.layer)
	must(err)
	setScan(r.p, scan)
	r.x, err = sp.NewBatch(b.comm, k.batch)
	must(err)
	l, n, rows, size := r.p.Layer(), k.batch.Batch, r.x.Rows(), r.p.Sizes(r.x)
	keys := func() tensor.Tensor { return b.gapped(l.DType, n, rows, l.KeyHeads, l.KeyDim) }
	values := func() tensor.Tensor { return b.gapped(l.DType, n, rows, l.ValueHeads, l.ValueDim) }
	gate := func() tensor.Tensor { return b.gapped(tensor.F32, n, rows, l.ValueHeads, 1).Select(3, 0) }
	r.a = Args{Q: keys(), K: keys(), V: values(), G: gate(), Beta: gate(), Out: values(), Saved: b.bytes(size.Saved), Workspace: b.bytes(size.Workspace)}
	r.g = Grads{DOut: values(), DQ: keys(), DK: keys(), DV: values(), DG: gate(), DBeta: gate()}
	for name, t := range map[uint64]tensor.Tensor{nameQ: r.a.Q, nameK: r.a.K, nameV: r.a.V, nameG: r.a.G, nameBeta: r.a.Beta, nameDOut: r.g.DOut} {
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

// result is a tensor of a call and what it is called; whole says that all ranks have all of it.
type result struct {
	name  string
	t     tensor.Tensor
	whole bool
}

func (r *coreRun) results() []result {
	x := []result{{"out", r.a.Out, false}, {"dq", r.g.DQ, false}, {"dk", r.g.DK, false}, {"dv", r.g.DV, false}, {"dg", r.g.DG, false}, {"dbeta", r.g.DBeta, false}}
	if !r.a.StateIn.IsNil() {
		x = append(x, result{"state_out", r.a.StateOut, true}, result{"dstate_in", r.g.DStateIn, true})
	}
	return x
}

// references are results in float64 by case and what it was asked, over all tests.
var references sync.Map

type lazy struct {
	once sync.Once
	x    map[string][]float64
}

// reference is the results of the whole batch in float64.
func (r *coreRun) reference(k *kase) map[string][]float64 {
	states := !r.a.StateIn.IsNil()
	entry, _ := references.LoadOrStore(fmt.Sprint("core ", k.name, r.p.layer.DType, states), new(lazy))
	e := entry.(*lazy)
	e.once.Do(func() { e.x = k.reference(r.p.layer, r.x, states) })
	return e.x
}

// whole is a global input, token-major.
func (k *kase) whole(name uint64, dtype tensor.DType, shape ...int64) (x []float64) {
	t := tensor.OfFloat32(make([]float32, tensor.Of(nil, tensor.F32, shape...).Numel()), shape...)
	for t.NDim < 4 {
		t = t.View(append(t.Dims(), 1)...)
	}
	f := k.input(name)
	each(t, func(i [4]int64, _ *float32) { x = append(x, float64(round(dtype, f(i)))) })
	return x
}

func (k *kase) geometry(l Layer, x *sp.Batch, states bool) *ref.GatedDelta {
	cu, _ := x.Documents()
	g := &ref.GatedDelta{Hk: l.KeyHeads, Hv: l.ValueHeads, Dk: l.KeyDim, Dv: l.ValueDim, Cu: cu, L2Norm: l.L2Norm, Scale: l.Scale}
	if states {
		g.In, g.Out = g.Documents(), g.Documents()
	}
	return g
}

func (k *kase) reference(l Layer, x *sp.Batch, states bool) map[string][]float64 {
	b, s, f32 := x.Batch(), x.Seq(), tensor.F32
	g := k.geometry(l, x, states)
	docs := g.Documents()
	q, key := k.whole(nameQ, l.DType, b, s, l.KeyHeads, l.KeyDim), k.whole(nameK, l.DType, b, s, l.KeyHeads, l.KeyDim)
	v, dout := k.whole(nameV, l.DType, b, s, l.ValueHeads, l.ValueDim), k.whole(nameDOut, l.DType, b, s, l.ValueHeads, l.ValueDim)
	decay, beta := k.whole(nameG, f32, b, s, l.ValueHeads), k.whole(nameBeta, f32, b, s, l.ValueHeads)
	var in, dlast []float64
	if states {
		in = k.whole(nameStateIn, f32, docs, l.ValueHeads, l.KeyDim, l.ValueDim)
		dlast = k.whole(nameDStateOut, f32, docs, l.ValueHeads, l.KeyDim, l.ValueDim)
	}
	out, last := ref.GatedDeltaForward(g, q, key, v, decay, beta, in)
	d := ref.GatedDeltaBackward(g, q, key, v, decay, beta, in, dout, dlast)
	return map[string][]float64{"out": out, "dq": ref.KeySum(g, d.DQ), "dk": ref.KeySum(g, d.DK), "dv": d.DV, "dg": d.DG, "dbeta": d.DBeta,
		"state_out": last, "dstate_in": d.DState}
}

// near holds a rank's results to those in float64: max|Δ|/max|ref| at most so much; rounding of
// numbers about 1 is granted, as gradients that are zero but for rounding have no other measure.
func near(b *bench, x *sp.Batch, results []result, exact map[string][]float64, limit float64) error {
	for _, y := range results {
		rows, lo := x.Seq(), x.Lo()
		if y.whole {
			rows, lo = y.t.Shape[1], 0
		}
		delta, top := far(b.host(y.t), exact[y.name], rows, lo)
		if allowed := max(limit*top, 1.0/(1<<23)); !(delta <= allowed) {
			return fmt.Errorf("%s: error %.3g of %.3g", y.name, delta, top)
		}
	}
	return nil
}

// sweep is what a test runs over: every number of ranks, with an even cut and with rows given, and
// of the rest all that is not narrowed.
type sweep struct {
	kinds    []devicetest.Kind
	dtypes   []tensor.DType
	cases    []string
	strategy Strategy // Auto = both, State in both of its forms
	most     int      // ranks; 0 = any
	brief    bool     // an even cut alone, and states in their first form
}

func (w sweep) run(t *testing.T, f func(b *bench, k *kase, scan bool) error) {
	if w.kinds == nil {
		w.kinds = []devicetest.Kind{host}
	}
	if w.dtypes == nil {
		w.dtypes = []tensor.DType{tensor.F32}
	}
	for _, kind := range w.kinds {
		for _, k := range cases {
			for _, way := range ways {
				if w.strategy != Auto && w.strategy != way.strategy || w.cases != nil && !slices.Contains(w.cases, k.name) {
					continue
				}
				t.Run(fmt.Sprint(kind.Name, "/", k.name, "/", way.name), func(t *testing.T) {
					for _, n := range mpitest.Sizes() {
						for _, dtype := range w.dtypes {
							for _, given := range []bool{false, true} {
								if w.most > 0 && n > w.most || n == 1 && (way.scan || given) || w.brief && (given || way.scan) {
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

// All results are within 2e-5 of the recurrence in float64, with states of documents and without,
// and what is sent is what was predicted.
func TestCoreAgainstFloat64(t *testing.T) {
	sweep{}.run(t, func(b *bench, k *kase, scan bool) error {
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
				return fmt.Errorf("states %v: sent %d, %d and %d bytes, predicted %d, %d and %d", states, between-before, after-between, b.sent()-after,
					forward, backward, r.p.RecomputeBytesSent(r.x))
			}
		}
		return b.gapsIntact()
	})
}
