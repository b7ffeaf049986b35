package gdn

import (
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/need"
)

// Every rank returns an error for an invalid layer, and for a layer that differs between ranks.
func TestLayersRefused(t *testing.T) {
	for _, x := range []struct {
		want   string
		change func(l *Layer)
	}{
		{"value_heads 3 is no multiple of key_heads 2", func(l *Layer) { l.ValueHeads = 3 }},
		{"key_heads 0", func(l *Layer) { l.KeyHeads = 0 }},
		{"value_heads -1", func(l *Layer) { l.ValueHeads = -1 }},
		{"key_dim 0", func(l *Layer) { l.KeyDim = 0 }},
		{"value_dim 0", func(l *Layer) { l.ValueDim = 0 }},
		{"chunk 15", func(l *Layer) { l.Chunk = 15 }},
		{"chunk -1", func(l *Layer) { l.Chunk = -1 }},
		{"conv_width -1", func(l *Layer) { l.ConvWidth = -1 }},
		{"tokens -1", func(l *Layer) { l.Tokens = -1 }},
		{"strategy 3", func(l *Layer) { l.Strategy = 3 }},
		{"scale NaN", func(l *Layer) { l.Scale = math.NaN() }},
		{"dtype F16", func(l *Layer) { l.DType = tensor.F16 }},
	} {
		for _, n := range mpitest.Sizes() {
			mpitest.Ranks(t, n, func(c comm.Comm) error {
				b := open(host, c)
				defer b.close()
				_, err := NewPlan(b.dev, c, with(x.change))
				if code := status.Of(err); code != status.InvalidArgument && code != status.Unsupported ||
					!strings.Contains(err.Error(), x.want) {
					return fmt.Errorf("%v, want %q", err, x.want)
				}
				// All ranks return, and the error names the rank that differs.
				l := small
				if c.Rank() == c.Size()-1 && c.Size() > 1 {
					x.change(&l)
				}
				if _, err := NewPlan(b.dev, c, l); c.Size() > 1 &&
					(status.Of(err) != status.InvalidArgument ||
						!strings.Contains(err.Error(), fmt.Sprintf("on rank %d", c.Size()-1))) {
					return fmt.Errorf("a rank that differs: %v", err)
				}
				return nil
			})
		}
	}
}

// Tensors of another shape, memory that is too small, and batches of another kind are errors before
// anything is sent.
func TestArgumentsAreChecked(t *testing.T) {
	b := open(host, alone())
	defer b.close()
	k := testCase{layer: with(func(l *Layer) { l.Strategy, l.GatedNorm = Heads, true }), batch: packed(20, 10)}
	mixed, err := sp.NewBatch(alone(), sp.BatchSpec{Batch: 1, Seq: 30, KVSeq: 20})
	must(err)
	other, err := sp.SketchBatch(1, 2, sp.BatchSpec{Batch: 1, Seq: 30})
	must(err)
	for _, x := range []struct {
		want  string
		spoil func(r *coreRun)
	}{
		{"q is", func(r *coreRun) { r.a.Q = r.a.Q.Slice(1, 0, 29) }},
		{"k is", func(r *coreRun) { r.a.K = r.a.V }},
		{"v is nil", func(r *coreRun) { r.a.V = tensor.Tensor{} }},
		{"g is", func(r *coreRun) { r.a.G = r.a.G.Slice(2, 0, 3) }},
		{"beta is", func(r *coreRun) { r.a.Beta.DType = tensor.BF16 }},
		{"out is", func(r *coreRun) { r.a.Out = r.a.Out.Permute(0, 1, 3, 2) }},
		{"dense", func(r *coreRun) { r.a.Q.Stride[3] = 2 }},
		{"state_in is", func(r *coreRun) { r.a.StateIn = r.a.StateIn.Slice(0, 0, 1) }},
		{"state_out is", func(r *coreRun) { r.a.StateOut = r.a.StateOut.Permute(0, 1, 3, 2) }},
		{"saved has", func(r *coreRun) { r.a.Saved = r.a.Saved.Slice(0, 0, r.a.Saved.Numel()/2) }},
		{"workspace has", func(r *coreRun) { r.a.Workspace = r.a.Workspace.Slice(0, 0, r.a.Workspace.Numel()/2) }},
		{"dq is", func(r *coreRun) { r.g.DQ = r.g.DV }},
		{"dout is nil", func(r *coreRun) { r.g.DOut = tensor.Tensor{} }},
		{"dstate_out is", func(r *coreRun) { r.g.DStateOut = r.g.DStateOut.Select(0, 0) }},
		{"other keys than queries", func(r *coreRun) { r.x = mixed }},
		{"rank 1 of 2", func(r *coreRun) { r.x = other }},
	} {
		r := prepare(b, &k, true, false)
		x.spoil(r)
		if err := r.run(); status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%v, want %q", err, x.want)
		}
	}
	r := prepare(b, &k, true, false)
	r.a.StateIn = tensor.Tensor{}
	must(r.p.Forward(b.stream, r.x, &r.a))
	if err := r.p.Backward(b.stream, r.x, &r.a, &r.g); status.Of(err) != status.InvalidArgument ||
		!strings.Contains(err.Error(), "dstate_in without state_in") {
		t.Error(err)
	}
	r.a.Saved = tensor.Tensor{}
	if err := r.p.Backward(b.stream, r.x, &r.a, &r.g); status.Of(err) != status.InvalidArgument ||
		!strings.Contains(err.Error(), "without a backward") {
		t.Error(err)
	}
	for _, x := range []struct {
		want  string
		spoil func(r *layerRun)
	}{
		{"qkv is", func(r *layerRun) { r.a.QKV = r.a.QKV.Slice(2, 0, 4) }},
		{"a is", func(r *layerRun) { r.a.A = r.a.QKV }},
		{"b is nil", func(r *layerRun) { r.a.B = tensor.Tensor{} }},
		{"conv is", func(r *layerRun) { r.a.Conv = r.a.Conv.Slice(1, 0, 3) }},
		{"a_log is", func(r *layerRun) { r.a.ALog = r.a.ALog.Slice(0, 0, 3) }},
		{"dt_bias is", func(r *layerRun) { r.a.DtBias = r.a.Conv }},
		{"dqkv is", func(r *layerRun) { r.g.DQKV = r.g.DA }},
		{"z is", func(r *layerRun) { r.a.Z = r.a.QKV }},
		{"norm is", func(r *layerRun) { r.a.Norm = r.a.ALog }},
		{"dz is nil", func(r *layerRun) { r.g.DZ = tensor.Tensor{} }},
		{"dnorm is", func(r *layerRun) { r.g.DNorm = r.g.DConv }},
		{"dconv is", func(r *layerRun) { r.g.DConv = r.g.DConv.Slice(0, 0, 1) }},
		{"workspace has", func(r *layerRun) { r.a.Workspace = r.a.Workspace.Slice(0, 0, 100) }},
		{"saved has", func(r *layerRun) { r.a.Saved = r.a.Saved.Slice(0, 0, 100) }},
		{"without a convolution", func(r *layerRun) { r.p.layer.ConvWidth = 0 }},
	} {
		r := prepareLayer(b, &k, false)
		x.spoil(r)
		if err := r.run(); status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%v, want %q", err, x.want)
		}
	}
}

// MaxSizes is enough for every batch of at most these sizes, with any documents.
func TestMaxSizesCoverAllBatches(t *testing.T) {
	sweep{}.run(t, func(b *bench, k *testCase, scan bool) error {
		if k.batch.Rows != nil {
			return nil
		}
		p, err := NewPlan(b.dev, b.comm, k.layer)
		must(err)
		setScan(p, scan)
		for _, more := range []int64{0, 1, 50} {
			most, err := p.MaxSizes(k.batch.Batch, k.batch.Seq+more, false)
			must(err)
			mostStates, err := p.MaxSizes(k.batch.Batch, k.batch.Seq+more, true)
			must(err)
			mostLayer, err := p.MaxLayerSizes(k.batch.Batch+more, k.batch.Seq)
			must(err)
			x, err := sp.NewBatch(b.comm, k.batch)
			must(err)
			l := p.layoutOf(x)
			if size := p.sizes(l, callKind{}); size.Saved > most.Saved || size.Workspace > most.Workspace {
				return fmt.Errorf("needs %v, MaxSizes is %v", size, most)
			}
			if size := p.Sizes(x); k.batch.CuSeqlens == nil && k.batch.Positions == nil &&
				(size.Saved > mostStates.Saved || size.Workspace > mostStates.Workspace) {
				return fmt.Errorf("with states: needs %v, MaxSizes is %v", size, mostStates)
			}
			if size := p.LayerSizes(x); size.Saved > mostLayer.Saved || size.Workspace > mostLayer.Workspace {
				return fmt.Errorf("layer: needs %v, MaxLayerSizes is %v", size, mostLayer)
			}
		}
		return p.Reserve(k.batch.Batch, k.batch.Seq)
	})
}

// A layer without a backward pass saves nothing, and its forward pass runs in the memory of Sizes.
func TestNoBackward(t *testing.T) {
	sweep{cases: slowCases, most: 4}.run(t, func(b *bench, k *testCase, scan bool) error {
		k.layer.NoBackward = true
		r, layer := prepare(b, k, true, scan), prepareLayer(b, k, scan)
		if r.p.Sizes(r.x).Saved != 0 || layer.p.LayerSizes(r.x).Saved != 0 {
			return fmt.Errorf("a layer with no_backward has Saved in %v, %v", r.p.Sizes(r.x), layer.p.LayerSizes(r.x))
		}
		r.a.Saved = b.bytes(1 << 20)
		if err := r.p.Forward(b.stream, r.x, &r.a); err == nil || !strings.Contains(err.Error(), "saved is given") {
			return fmt.Errorf("with saved: %v", err)
		}
		r.a.Saved, layer.a.Saved = tensor.Tensor{}, tensor.Tensor{}
		must(r.p.Forward(b.stream, r.x, &r.a))
		must(layer.p.LayerForward(b.stream, layer.x, &layer.a))
		if err := near(b, r.x, []result{{"out", r.a.Out, false}, {"state_out", r.a.StateOut, true}}, r.reference(k),
			2e-5); err != nil {
			return err
		}
		return near(b, layer.x, layer.activations()[:1], layer.reference(k), 2e-5)
	})
}

// Auto chooses the strategy that sends fewer bytes, and String says so.
func TestAutoChoosesByBytes(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			b := open(host, c)
			defer b.close()
			for _, conv := range []int64{0, 4} {
				last := Heads
				for tokens := int64(0); tokens < 5000; tokens = tokens*2 + 1 {
					l := with(func(l *Layer) { l.Tokens, l.ConvWidth = tokens, conv })
					p, err := NewPlan(b.dev, c, l)
					must(err)
					var bytes [3]int64
					for _, s := range []Strategy{Heads, State} {
						l.Strategy = s
						q, err := NewPlan(b.dev, c, l)
						must(err)
						x, err := sp.NewBatch(c, sp.BatchSpec{Batch: 1, Seq: max(1, tokens)})
						must(err)
						sent := q.BytesSent
						if conv > 0 {
							sent = q.LayerBytesSent
						}
						forward, backward := sent(x)
						sum := []float64{float64(forward + backward)}
						must(c.AllReduce(nil, tensor.OfFloat64(sum, 1), comm.Sum))
						bytes[s] = int64(sum[0])
					}
					want := Heads
					if tokens > 0 && bytes[State] < bytes[Heads] {
						want = State
					}
					if p.Strategy() != want || p.Layer().Strategy != want {
						return fmt.Errorf("%d tokens: strategy %v, but heads sends %d bytes and state %d", tokens,
							p.Strategy(), bytes[Heads], bytes[State])
					}
					text := p.String()
					if n > 1 && tokens > 0 &&
						!strings.Contains(text,
							fmt.Sprintf("%d bytes by heads and %d by state", bytes[Heads], bytes[State])) ||
						!strings.Contains(text, "by "+want.String()) {
						return fmt.Errorf("%d tokens, %d and %d bytes: %s", tokens, bytes[Heads], bytes[State], text)
					}
					last = want
				}
				if n > 1 && last != State {
					return fmt.Errorf(
						"5000 tokens over %d ranks: strategy heads; the test needs a case in which state sends fewer bytes",
						n)
				}
			}
			return nil
		})
	}
}

// Over many ranks, states are sent by the prefix scan, which sends fewer bytes than gathering.
func TestScanOverManyRanks(t *testing.T) {
	for n, want := range map[int64]bool{2: false, 8: false, 16: true, 100: true} {
		p := &Plan{base: base{layer: with(func(l *Layer) { l.Strategy, l.Scale = State, 1 }), size: n}}
		must(p.choose())
		m := p.method.(*stateMethod)
		var shards tokenShards
		b, err := sp.SketchBatch(0, int(n), sp.BatchSpec{Batch: 1, Seq: 3 * n})
		must(err)
		shards.fill(b)
		var gather, scan int64
		for position := range n {
			gather += m.chain.elementsSent(&shards, position, false, false)
			scan += m.chain.elementsSent(&shards, position, true, false)
		}
		if m.chain.scan != want || want != (gather >= 2*scan) {
			t.Errorf("%d ranks: scan %v, %d elements by scan and %d by gather", n, m.chain.scan, scan, gather)
		}
	}
}

func TestStrategyNames(t *testing.T) {
	for _, s := range []Strategy{Auto, Heads, State} {
		if got, err := ParseStrategy(s.String()); got != s || err != nil {
			t.Errorf("%v: %v, %v", s, got, err)
		}
	}
	if _, err := ParseStrategy("rings"); status.Of(err) != status.InvalidArgument ||
		!strings.Contains(err.Error(), "rings") {
		t.Error(err)
	}
}

// Calls allocate nothing. Allocations are counted for the whole process, so the count is taken
// between barriers, and the smallest of several rounds counts: the runtime allocates occasionally.
func TestCallsAllocateNothing(t *testing.T) {
	need.ExactAllocations(t)
	for _, n := range mpitest.Sizes() {
		for _, way := range strategies {
			mpitest.Ranks(t, n, func(c comm.Comm) error {
				b := open(host, c)
				defer b.close()
				k := testCase{
					layer: with(func(l *Layer) {
						l.KeyHeads, l.ValueHeads, l.Strategy, l.GatedNorm = 3, 6, way.strategy, true
					}), batch: packed(11, 90, 4)}
				core, layer := prepare(b, &k, true, way.scan), prepareLayer(b, &k, way.scan)
				all := func() {
					must(core.run())
					must(core.p.Recompute(b.stream, core.x, &core.a))
					must(layer.run())
					must(layer.p.LayerRecompute(b.stream, layer.x, &layer.a))
				}
				all()
				best := uint64(math.MaxUint64)
				for range 5 {
					var before, after runtime.MemStats
					must(c.Barrier())
					runtime.ReadMemStats(&before)
					must(c.Barrier())
					for range 4 {
						all()
					}
					must(c.Barrier())
					runtime.ReadMemStats(&after)
					best = min(best, after.Mallocs-before.Mallocs)
				}
				if best > 0 {
					return fmt.Errorf("%s: %d allocations in 4 rounds of %d ranks", way.name, best, n)
				}
				return nil
			})
		}
	}
}
