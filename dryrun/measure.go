package dryrun

import (
	"cmp"
	"math"
	"sync"
	"time"

	"ulysses/device"
	"ulysses/tensor"
)

// Shape gives the sizes of the work that Measure times. Rates depend on the sizes of heads and
// layers.
type Shape struct {
	Compute          tensor.DType
	Hidden           int64 // features of a token
	Wide             int64 // features inside the MLP; 0 = Hidden
	Tokens           int64 // of a rank; 0 = 1024
	Sequence         int64 // tokens that attention sees; 0 = 1024
	Dim              int64 // of an attention head
	KeyDim, ValueDim int64 // of a head of the gated delta rule; 0 = the model has none
}

// In returns the shape with another compute type.
func (x Shape) In(compute tensor.DType) Shape {
	x.Compute = compute
	return x
}

// Each kind of work is repeated for the time repeat, in laps. The fastest lap counts, so other work
// on the machine changes the result little.
const (
	repeat   = 60 * time.Millisecond
	lap      = 5 * time.Millisecond
	maxFlops = 1e9 // largest number of FLOP of a measured call whose sizes are free
)

// Measure times each kind of work on devices that work at the same time, one for each rank of a
// node, and returns their mean rates. It takes about a second. Communication in the node is assumed
// to have half the rate of a copy. The network is not measured and gets the same rate.
func Measure(devices []device.Device, x Shape) (Rates, error) {
	all, errs := make([]Rates, len(devices)), make([]error, len(devices))
	start := newBarrier(len(devices))
	var group sync.WaitGroup
	for i, d := range devices {
		group.Add(1)
		go func() {
			defer group.Done()
			p := probe{d: d, barrier: start}
			all[i] = p.rates(x)
			errs[i] = p.err
			p.free()
		}()
	}
	group.Wait()
	mean, n := Rates{Launch: 2e-6, Latency: 2e-6, Network: 1, PerNode: len(devices)}, float64(len(devices))
	for i, r := range all {
		if errs[i] != nil {
			return Rates{}, errs[i]
		}
		mean.Products += r.Products / n
		mean.Attention += r.Attention / n
		mean.Gradient += r.Gradient / n
		mean.Delta += r.Delta / n
		mean.DeltaBack += r.DeltaBack / n
		mean.Stencil += r.Stencil / n
		mean.Memory += r.Memory / n
		mean.Copies += r.Copies / n
	}
	mean.Node, mean.Network = mean.Copies/2, mean.Copies/2
	return mean, nil
}

// MeasurePeak times large matrix products on one device, with operands that may be in the caches,
// and returns the FLOP/s of the fastest repetition. The products of a model are smaller, or their
// operands come from memory. It takes about 60 ms.
func MeasurePeak(d device.Device, compute tensor.DType) (float64, error) {
	p := probe{d: d, barrier: newBarrier(1), warm: true}
	defer p.free()
	p.s, p.err = d.NewStream()
	if p.err != nil {
		return 0, p.err
	}
	defer p.s.Close()
	const tokens, width = 2048, 512
	x, w, y := p.tensor(compute, tokens, width), p.tensor(compute, width, width), p.tensor(compute, tokens, width)
	product := device.Gemm{A: x, B: w.Permute(1, 0), C: y}
	rate := p.rate(2*tokens*width*width, func() error { return p.d.Gemm(p.s, &product) })
	return rate, p.err
}

// barrier makes the goroutines of all devices begin each kind of work together.
type barrier struct {
	mu          sync.Mutex
	all         *sync.Cond
	size, count int
	round       int // number of times that all have arrived
}

func newBarrier(n int) *barrier {
	m := &barrier{size: n}
	m.all = sync.NewCond(&m.mu)
	return m
}

func (m *barrier) wait() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.count++
	round := m.round
	if m.count == m.size {
		m.count, m.round = 0, round+1
		m.all.Broadcast()
	}
	for m.round == round {
		m.all.Wait()
	}
}

// probe times operations of one device. The first error ends all later measurements.
type probe struct {
	d       device.Device
	s       device.Stream
	barrier *barrier
	buffers []device.Buffer
	other   tensor.Tensor // 16 MiB for evictCaches
	warm    bool          // the operands may be in the caches
	err     error
}

func (p *probe) free() {
	for _, b := range p.buffers {
		b.Free()
	}
}

func (p *probe) tensor(dtype tensor.DType, shape ...int64) tensor.Tensor {
	t := tensor.Of(nil, dtype, shape...)
	if p.err != nil {
		return t
	}
	var b device.Buffer
	if b, p.err = p.d.Alloc(max(1, t.Bytes())); p.err == nil {
		p.buffers = append(p.buffers, b)
		t.Data, t.Where = b.Pointer(), p.d.Info().Place
	}
	// Unwritten memory maps to one page of zeros, which stays in the cache, so the tensors are
	// filled. The logarithm of a decay is at most 0.
	if p.err == nil && (dtype == tensor.F32 || dtype == tensor.BF16) {
		p.err = p.d.Fill(p.s, t, -0.01)
	}
	return t
}

// evictCaches fills a core's caches with memory that the timed call does not use. In a step no
// operation follows itself, so its operands are not in the caches.
func (p *probe) evictCaches() {
	if p.err == nil && p.other.IsNil() {
		p.other = p.tensor(tensor.F32, 4<<20)
	}
	if p.err == nil {
		p.err = p.d.Scale(p.s, p.other, 1)
	}
	if p.err == nil {
		p.err = p.s.Sync()
	}
}

// rate repeats a call after one call that is not timed, and returns work divided by the seconds of
// a call in the fastest lap. All devices begin together. A device that failed still takes part,
// because the others wait for it at the barrier.
func (p *probe) rate(work float64, call func() error) (best float64) {
	once := func() {
		if p.err == nil {
			p.err = call()
		}
		if p.err == nil {
			p.err = p.s.Sync()
		}
	}
	once()
	p.barrier.wait()
	for began := time.Now(); p.err == nil && time.Since(began) < repeat; {
		n, spent := 0.0, time.Duration(0)
		for p.err == nil && spent < lap && (n == 0 || time.Since(began) < repeat) {
			if !p.warm {
				p.evictCaches()
			}
			start := time.Now()
			once()
			spent += time.Since(start)
			n++
		}
		best = max(best, n*work/spent.Seconds())
	}
	p.barrier.wait()
	return best
}

// defaultTokens is the number of tokens of the measured work if Shape does not give one.
const defaultTokens = 1024

// layers returns the FLOP/s of the matrix products of a layer: forward and both gradients, for a
// square and a wide matrix. The number of tokens is a rank's, limited so that a call has at most
// maxFlops.
func (p *probe) layers(x Shape) float64 {
	wide := cmp.Or(x.Wide, x.Hidden)
	all := 6 * float64(x.Hidden) * float64(x.Hidden+wide) // FLOP of a token
	tokens := max(64, min(cmp.Or(x.Tokens, defaultTokens), int64(maxFlops/all)))
	var calls []device.Gemm
	for _, n := range []int64{x.Hidden, wide} {
		in, out, w := p.tensor(x.Compute, tokens, x.Hidden), p.tensor(x.Compute, tokens, n),
			p.tensor(x.Compute, n, x.Hidden)
		calls = append(calls, device.Gemm{A: in, B: w.Permute(1, 0), C: out}, device.Gemm{A: out, B: w, C: in},
			device.Gemm{A: out.Permute(1, 0), B: in, C: p.tensor(tensor.F32, n, x.Hidden), Accumulate: true})
	}
	return p.rate(all*float64(tokens), func() error {
		for i := range calls {
			if err := p.d.Gemm(p.s, &calls[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// rates measures all kinds of work.
func (p *probe) rates(x Shape) (r Rates) {
	p.s, p.err = p.d.NewStream()
	r.Products = p.layers(x)
	const heads = 4
	sequence := max(256, min(cmp.Or(x.Sequence, defaultTokens), int64(math.Sqrt(maxFlops/float64(2*heads*x.Dim)))))
	p.attention(x, sequence, heads, &r)
	if r.Delta = 1; x.KeyDim > 0 {
		p.delta(x, heads, &r)
	}
	p.memory(x, cmp.Or(x.Tokens, sequence), &r)
	return r
}

// attention measures attention over one causal document of n tokens, forward and backward.
func (p *probe) attention(x Shape, n, heads int64, r *Rates) {
	q := device.AttentionGrad{Attention: device.Attention{CuQ: []int64{0, n}, CuK: []int64{0, n}, Causal: true,
		Scale: 0.1}}
	for _, t := range []*tensor.Tensor{&q.Q, &q.K, &q.V, &q.Out, &q.DOut, &q.DQ, &q.DK, &q.DV} {
		if *t = p.tensor(x.Compute, n, heads, x.Dim); !p.d.Info().TokenMajor {
			*t = p.tensor(x.Compute, heads, n, x.Dim).Permute(1, 0, 2)
		}
	}
	q.LSE = p.tensor(tensor.F32, n, heads)
	q.Workspace = p.tensor(tensor.U8,
		max(1, p.d.AttentionWorkspace(&q.Attention, false), p.d.AttentionWorkspace(&q.Attention, true)))
	flops := attentionFlops(&q.Attention)
	r.Attention = p.rate(flops, func() error { return p.d.AttentionForward(p.s, &q.Attention) })
	r.Gradient = p.rate(2.5*flops, func() error { return p.d.AttentionBackward(p.s, &q) })
}

// memory measures operations whose time is that of their memory traffic, and copies, on [tokens,
// Hidden].
func (p *probe) memory(x Shape, tokens int64, r *Rates) {
	dt := x.Compute
	const most = 64 << 20 // largest size of a tensor in bytes
	wide := max(64, min(tokens, most/(x.Hidden*dt.Size())))
	gate, up, y := p.tensor(dt, wide, x.Hidden), p.tensor(dt, wide, x.Hidden), p.tensor(dt, wide, x.Hidden)
	weight, rstd, dw := p.tensor(dt, x.Hidden), p.tensor(tensor.F32, wide), p.tensor(tensor.F32, x.Hidden)
	norm, swiglu := device.RMSNorm{X: y, W: weight, Y: gate, RStd: rstd, Eps: 1e-6},
		device.SwiGLU{Gate: gate, Up: up, Y: y}
	dnorm := device.RMSNormGrad{X: y, W: weight, RStd: rstd, DY: gate, DX: up, DW: dw, AddDX: true}
	dswiglu := device.SwiGLUGrad{Gate: gate, Up: up, DY: y, DGate: gate, DUp: up}
	tensors, seconds := 0.0, 0.0 // passes over a tensor, as enqueue counts them
	for _, op := range []struct {
		tensors float64
		call    func() error
	}{{3, func() error { return p.d.SwiGLUForward(p.s, &swiglu) }},
		{2, func() error { return p.d.RMSNormForward(p.s, &norm) }},
		{4, func() error { return p.d.RMSNormBackward(p.s, &dnorm) }},
		{5, func() error { return p.d.SwiGLUBackward(p.s, &dswiglu) }}} {
		tensors += op.tensors
		seconds += op.tensors / p.rate(op.tensors*float64(y.Bytes()), op.call)
	}
	r.Memory = tensors / seconds
	r.Copies = p.rate(float64(y.Bytes()), func() error { return p.d.Copy(p.s, up, y) })
}

// delta measures the gated delta rule, forward and backward, and the convolution before it.
func (p *probe) delta(x Shape, heads int64, r *Rates) {
	dt := x.Compute
	of := func(width int64) tensor.Tensor { return p.tensor(dt, defaultTokens, heads, width) }
	gates := func() tensor.Tensor { return p.tensor(tensor.F32, defaultTokens, heads) }
	channels := heads * (2*x.KeyDim + x.ValueDim)
	// q, k and v are channels of one tensor, as in a layer
	convOutput := func() (q, k, v tensor.Tensor) {
		all, keys := p.tensor(dt, defaultTokens, channels), heads*x.KeyDim
		columns := func(lo, hi, width int64) tensor.Tensor {
			t := all.Slice(1, lo, hi)
			t.NDim, t.Shape[1], t.Shape[2], t.Stride[1], t.Stride[2] = 3, heads, width, width, 1
			return t
		}
		return columns(0, keys, x.KeyDim), columns(keys, 2*keys, x.KeyDim), columns(2*keys, channels, x.ValueDim)
	}
	g := device.GatedDeltaGrad{GatedDelta: device.GatedDelta{Out: of(x.ValueDim), G: gates(), Beta: gates(),
		Cu: []int64{0, defaultTokens}, L2Norm: true, Scale: 0.1},
		DOut: of(x.ValueDim), DG: gates(), DBeta: gates()}
	g.Q, g.K, g.V = convOutput()
	g.DQ, g.DK, g.DV = convOutput()
	sizes := p.d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = p.tensor(tensor.U8, max(1, sizes.Saved)),
		p.tensor(tensor.U8, max(1, sizes.Forward, sizes.Backward))
	flops := deltaFlops(g.K, g.V, 0)
	r.Delta = p.rate(flops, func() error { return p.d.GatedDeltaForward(p.s, &g.GatedDelta) })
	r.DeltaBack = p.rate(2.5*flops, func() error { return p.d.GatedDeltaBackward(p.s, &g) })

	const taps = 4
	c := device.Conv1dGrad{Conv1d: device.Conv1d{X: p.tensor(dt, defaultTokens, channels),
		Y: p.tensor(dt, defaultTokens, channels), W: p.tensor(dt, channels, taps), Cu: []int64{0, defaultTokens}},
		DY: p.tensor(dt, defaultTokens, channels), DX: p.tensor(dt, defaultTokens, channels),
		DW: p.tensor(tensor.F32, channels, taps)}
	forward := p.rate(float64(2*c.X.Bytes()), func() error { return p.d.Conv1dForward(p.s, &c.Conv1d) })
	r.Stencil = 5 / (2/forward + 3/p.rate(float64(3*c.X.Bytes()), func() error { return p.d.Conv1dBackward(p.s, &c) }))
}
