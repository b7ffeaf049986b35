package gdn

import (
	"fmt"
	"testing"

	"ulysses/comm"
	"ulysses/sp"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/ref"
)

// normEps is the epsilon of gated norms.
const normEps = 1e-6

// layerRun is a plan of a layer, a batch and the tensors of this rank.
type layerRun struct {
	*bench
	p *Plan
	x *sp.Batch
	a LayerArgs
	g LayerGrads
}

// projection returns q|k|v, a and b as columns of one tensor [B, n, C + 2·Hv + 3], as a projection
// writes them.
func (b *bench) projection(l Layer, n, rows int64) (qkv, x, y tensor.Tensor) {
	c, h := l.Channels(), l.ValueHeads
	all := b.gapped(l.DType, n, rows, 1, c+2*h).Select(2, 0)
	return all.Slice(2, 0, c), all.Slice(2, c, c+h), all.Slice(2, c+h, c+2*h)
}

func prepareLayer(b *bench, k *testCase, scan bool) *layerRun {
	r := &layerRun{bench: b}
	r.p, r.x = b.plan(k, scan)
	l, n, rows, size := r.p.Layer(), k.batch.Batch, r.x.Rows(), r.p.LayerSizes(r.x)
	values := func() tensor.Tensor { return b.gapped(l.DType, n, rows, l.ValueHeads, l.ValueDim) }
	r.a.QKV, r.a.A, r.a.B = b.projection(l, n, rows)
	r.g.DQKV, r.g.DA, r.g.DB = b.projection(l, n, rows)
	r.a.Out, r.g.DOut, r.a.Saved, r.a.Workspace = values(), values(), b.bytes(size.Saved), b.bytes(size.Workspace)
	r.a.Conv = b.dense(l.DType, l.Channels(), l.ConvWidth)
	r.a.ALog, r.a.DtBias = b.dense(tensor.F32, l.ValueHeads), b.dense(l.DType, l.ValueHeads)
	r.g.DConv, r.g.DALog, r.g.DDtBias = b.dense(tensor.F32, l.Channels(), l.ConvWidth),
		b.dense(tensor.F32, l.ValueHeads), b.dense(tensor.F32, l.ValueHeads)
	activations := map[uint64]tensor.Tensor{nameQKV: r.a.QKV, nameA: r.a.A, nameB: r.a.B, nameDOut: r.g.DOut}
	weights := map[uint64]tensor.Tensor{nameConv: r.a.Conv, nameALog: r.a.ALog, nameDtBias: r.a.DtBias}
	if l.GatedNorm {
		r.a.Z, r.a.Norm, r.a.Eps, r.g.DZ, r.g.DNorm = values(), b.dense(l.DType, l.ValueDim), normEps, values(),
			b.dense(tensor.F32, l.ValueDim)
		activations[nameZ], weights[nameNorm] = r.a.Z, r.a.Norm
	}
	for _, t := range r.weightGrads() {
		must(b.dev.Fill(b.stream, t.t, 0))
	}
	for name, t := range activations {
		b.put(t, r.x.Lo(), k.input(name))
	}
	for name, t := range weights {
		b.put(t, 0, k.input(name))
	}
	return r
}

func (r *layerRun) run() error {
	if err := r.p.LayerForward(r.stream, r.x, &r.a); err != nil {
		return err
	}
	return r.p.LayerBackward(r.stream, r.x, &r.a, &r.g)
}

func (r *layerRun) activations() []result {
	x := []result{{"out", r.a.Out, false}, {"dqkv", r.g.DQKV, false}, {"da", r.g.DA, false}, {"db", r.g.DB, false}}
	if r.p.layer.GatedNorm {
		x = append(x, result{"dz", r.g.DZ, false})
	}
	return x
}

// weightGrads returns this rank's gradients of the weights.
func (r *layerRun) weightGrads() []result {
	x := []result{{"dconv", r.g.DConv, true}, {"da_log", r.g.DALog, true}, {"ddt_bias", r.g.DDtBias, true}}
	if r.p.layer.GatedNorm {
		x = append(x, result{"dnorm", r.g.DNorm, true})
	}
	return x
}

// weights returns the gradients of the weights, summed over all ranks.
func (r *layerRun) weights(host comm.Comm) (x []result) {
	for _, y := range r.weightGrads() {
		y.t = r.host(y.t)
		must(host.AllReduce(nil, y.t, comm.Sum))
		x = append(x, y)
	}
	return x
}

func (r *layerRun) reference(k *testCase) map[string][]float64 {
	entry, _ := references.LoadOrStore(fmt.Sprint("layer ", k.name, r.p.layer.DType), new(lazy))
	e := entry.(*lazy)
	e.once.Do(func() { e.x = k.layerReference(r.p.layer, r.x, nil) })
	return e.x
}

// compare compares the results with float64. In BF16, where roundings between the operations of a
// layer are allowed, and where the gradient of the norm amplifies them, the limit is twice the
// error of an implementation that rounds there, and at least 1/64.
func (r *layerRun) compare(k *testCase) error {
	results := append(r.activations(), r.weights(hostOf(r.comm))...)
	exact, plain, limit := r.reference(k), map[string]float64{}, 2e-5
	if r.p.layer.DType == tensor.BF16 {
		plain, limit = errorsOf(results, exact, k.layerReference(r.p.layer, r.x, inBF16)), 1.0/64
	}
	for _, x := range results {
		if err := near(r.bench, r.x, []result{x}, exact, max(limit, 2*plain[x.name])); err != nil {
			return err
		}
	}
	return nil
}

// layerReference returns the results of the whole batch. keep: ref.GatedDelta.Keep, also for values
// between the operations of the layer.
func (k *testCase) layerReference(l Layer, x *sp.Batch, keep func(float64) float64) map[string][]float64 {
	kept := func(x []float64) []float64 {
		for i := range x {
			if keep != nil {
				x[i] = keep(x[i])
			}
		}
		return x
	}
	b, s, c, h := x.Batch(), x.Seq(), l.Channels(), l.ValueHeads
	g := k.geometry(l, x, false)
	g.Keep = keep
	qkv, dout := k.whole(nameQKV, l.DType, b, s, c), k.whole(nameDOut, l.DType, b, s, h, l.ValueDim)
	a, bb := k.whole(nameA, l.DType, b, s, h), k.whole(nameB, l.DType, b, s, h)
	w, alog, bias := k.whole(nameConv, l.DType, c, l.ConvWidth), k.whole(nameALog, tensor.F32, h),
		k.whole(nameDtBias, l.DType, h)
	conv := &ref.Conv1d{C: c, Width: l.ConvWidth, Cu: g.Cu}
	y := kept(ref.Conv1dForward(conv, qkv, w, nil))
	keys := l.KeyHeads * l.KeyDim
	part := func(t []float64, lo, hi int64) (p []float64) {
		for i := range b * s {
			p = append(p, t[i*c+lo:i*c+hi]...)
		}
		return p
	}
	q, key, v := part(y, 0, keys), part(y, keys, 2*keys), part(y, 2*keys, c)
	decay, beta := ref.DeltaGates(a, bb, alog, bias)
	out, _ := ref.GatedDeltaForward(g, q, key, v, decay, beta, nil)
	results := map[string][]float64{"out": kept(out)}
	if l.GatedNorm {
		z, w, dw := k.whole(nameZ, l.DType, b, s, h, l.ValueDim), k.whole(nameNorm, l.DType, l.ValueDim),
			make([]float64, l.ValueDim)
		y, rstd := ref.GatedRMSNorm(l.ValueDim, out, z, w, normEps)
		results["out"], results["dnorm"] = y, dw
		dout, results["dz"] = ref.GatedRMSNormGrad(l.ValueDim, out, z, w, rstd, dout, dw)
		kept(dout)
	}
	d := ref.GatedDeltaBackward(g, q, key, v, decay, beta, nil, dout, nil)
	dq, dk, dv, dy := kept(ref.KeySum(g, d.DQ)), kept(ref.KeySum(g, d.DK)), kept(d.DV), make([]float64, 0, len(y))
	for i := range b * s {
		dy = append(dy, dq[i*keys:(i+1)*keys]...)
		dy = append(dy, dk[i*keys:(i+1)*keys]...)
		dy = append(dy, dv[i*(c-2*keys):(i+1)*(c-2*keys)]...)
	}
	dw, dalog, dbias := make([]float64, len(w)), make([]float64, h), make([]float64, h)
	dx, _ := ref.Conv1dBackward(conv, qkv, w, nil, dy, dw)
	da, db := ref.DeltaGatesGrad(a, bb, alog, bias, d.DG, d.DBeta, dalog, dbias)
	results["dqkv"], results["da"], results["db"], results["dconv"], results["da_log"], results["ddt_bias"] = dx, da,
		db, dw, dalog, dbias
	return results
}

// All results of the layer are within 2e-5 of float64, also for tokens whose convolution reads
// another rank's tokens, and the bytes sent are the predicted ones.
func TestLayerAgainstFloat64(t *testing.T) {
	sweep{}.run(t, func(b *bench, k *testCase, scan bool) error {
		r := prepareLayer(b, k, scan)
		forward, backward := r.p.LayerBytesSent(r.x)
		before := b.sent()
		must(r.p.LayerForward(b.stream, r.x, &r.a))
		between := b.sent()
		must(r.p.LayerBackward(b.stream, r.x, &r.a, &r.g))
		after := b.sent()
		if between-before != forward || after-between != backward {
			return fmt.Errorf("sent %d and %d bytes, predicted %d and %d", between-before, after-between, forward,
				backward)
		}
		if err := near(b, r.x, append(r.activations(), r.weights(b.comm)...), r.reference(k), 2e-5); err != nil {
			return err
		}
		return b.gapsIntact()
	})
}

// With Heads, the layer on any number of ranks is bitwise equal to one rank, except for sums over
// the ranks: the gradient of the norm's weight, and gradients of inputs and weights of key heads
// that several ranks share.
func TestLayerHeadsBitwiseEqualToOneRank(t *testing.T) {
	sweep{strategy: Heads}.run(t, func(b *bench, k *testCase, scan bool) error {
		return layerBitsOfOne(b, k, host)
	})
}

func layerBitsOfOne(b *bench, k *testCase, kind devicetest.Kind) error {
	r := prepareLayer(b, k, false)
	must(r.run())
	whole := *k
	whole.batch.Rows = nil
	one := prepareLayer(open(kind, alone()), &whole, false)
	must(one.run())
	want := append(one.activations(), one.weights(alone())...)
	for i, x := range append(r.activations(), r.weights(hostOf(b.comm))...) {
		lo, got, w := r.x.Lo(), b.host(x.t), one.host(want[i].t)
		if x.whole {
			lo = 0
		}
		if x.name == "dnorm" || sharedKeys(r.p) && (x.name == "dqkv" || x.name == "dconv") {
			if delta, top := far(got, floats(w), w.Shape[1], lo); !(delta <= 1e-6*max(top, 1)) {
				return fmt.Errorf("%s: the difference from one rank is %.3g, the largest value %.3g", x.name,
					delta, top)
			}
			continue
		}
		if err := sameBits(x.name, got, w, lo); err != nil {
			return err
		}
	}
	one.close()
	return nil
}

// A second run, and recomputing the output from Saved, give bitwise equal results. Gradients of
// weights are added to.
func TestLayerRepeatedCallsBitwiseEqual(t *testing.T) {
	sweep{cases: slowCases, most: 4}.run(t, func(b *bench, k *testCase, scan bool) error {
		r, again := prepareLayer(b, k, scan), prepareLayer(b, k, scan)
		must(r.run())
		must(again.run())
		for _, t := range again.weightGrads() {
			must(b.dev.Fill(b.stream, t.t, 0))
		}
		must(b.dev.Fill(b.stream, again.a.Workspace, 0x7f))
		if again.a.Out.Numel() > 0 {
			must(b.dev.Fill(b.stream, again.a.Out, 0))
		}
		sent := b.sent()
		must(again.p.LayerRecompute(b.stream, again.x, &again.a))
		if sent = b.sent() - sent; sent != again.p.RecomputeBytesSent(again.x) {
			return fmt.Errorf("recomputing sent %d bytes, predicted %d", sent, again.p.RecomputeBytesSent(again.x))
		}
		must(again.p.LayerBackward(b.stream, again.x, &again.a, &again.g))
		want := append(r.activations(), r.weights(b.comm)...)
		for i, x := range append(again.activations(), again.weights(b.comm)...) {
			if err := sameBits(x.name, b.host(x.t), b.host(want[i].t), 0); err != nil {
				return err
			}
		}
		must(again.p.LayerBackward(b.stream, again.x, &again.a, &again.g))
		for i, x := range again.weights(b.comm) { // twice as much now
			twice := b.host(want[len(r.activations())+i].t)
			must(b.dev.Scale(b.stream, twice, 2))
			delta, top := far(x.t, floats(twice), x.t.Shape[1], 0)
			if !(delta <= 1e-6*max(1, top)) {
				return fmt.Errorf(
					"%s of two backward passes: the difference from twice that of one pass is %.3g, the largest value %.3g",
					x.name, delta, top)
			}
		}
		must(b.dev.Fill(b.stream, again.a.Workspace, 0xff))
		again.a.Saved = tensor.Tensor{}
		must(again.p.LayerForward(b.stream, again.x, &again.a))
		return sameBits("out without saved", b.host(again.a.Out), b.host(r.a.Out), 0)
	})
}

func floats(t tensor.Tensor) (x []float64) {
	each(t, func(_ [4]int64, v *float32) { x = append(x, float64(*v)) })
	return x
}

// The layer on test devices, and in BF16, where the error is that of roundings to BF16, also of q,
// k and v after the convolution.
func TestLayerOnTestDevices(t *testing.T) {
	sweep{kinds: fakes(), dtypes: []tensor.DType{tensor.F32, tensor.BF16}, cases: slowCases, most: 3}.run(t,
		func(b *bench, k *testCase, scan bool) error {
			if k.layer.DType == tensor.F32 && k.layer.Strategy == Heads {
				if err := layerBitsOfOne(b, k, host); err != nil {
					return err
				}
			}
			r := prepareLayer(b, k, scan)
			must(r.run())
			if err := r.compare(k); err != nil {
				return err
			}
			return b.gapsIntact()
		})
}
