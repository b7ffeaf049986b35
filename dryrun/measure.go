package dryrun

import (
	"cmp"
	"math"
	"sync"
	"time"

	"ulysses/device"
	"ulysses/tensor"
)

// Shape is the work that rates are measured on: rates depend on the widths of heads and rows.
type Shape struct {
	Compute          tensor.DType
	Hidden           int64 // features of a token
	Wide             int64 // features inside the MLP; 0 = Hidden
	Tokens           int64 // of a rank; 0 = 1024
	Sequence         int64 // tokens that attention sees; 0 = 1024
	Dim              int64 // of an attention head
	KeyDim, ValueDim int64 // of a head of the gated delta rule; 0 = there are none
}

// In is the shape computed in a type.
func (x Shape) In(compute tensor.DType) Shape {
	x.Compute = compute
	return x
}

// Each kind of work is repeated for a time, lap after lap. The best lap counts: what else the
// machine does meanwhile is not the plan's.
const (
	repeat = 60 * time.Millisecond
	lap    = 5 * time.Millisecond
	moment = 1e9 // largest number of FLOP of a measured call whose sizes are free
)

// Measure times each kind of work on devices that work at the same time, one for each rank of a
// node, and is what one of them gets done on average. It takes about a second. What moves between
// ranks of the node is taken to go at half a copy's rate; there is no network to measure.
func Measure(devices []device.Device, x Shape) (Rates, error) {
	all, errs := make([]Rates, len(devices)), make([]error, len(devices))
	start := newMeeting(len(devices))
	var group sync.WaitGroup
	for i, d := range devices {
		group.Add(1)
		go func() {
			defer group.Done()
			p := probe{d: d, meet: start}
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

// MeasureProducts times matrix products on one device and returns the FLOP/s of the fastest
// repetition. It takes about 60 ms.
func MeasureProducts(d device.Device, x Shape) (float64, error) {
	p := probe{d: d, meet: newMeeting(1)}
	defer p.free()
	p.s, p.err = d.NewStream()
	if p.err != nil {
		return 0, p.err
	}
	defer p.s.Close()
	rate := p.products(x)
	return rate, p.err
}

// meeting lets devices begin each kind of work together.
type meeting struct {
	mu          sync.Mutex
	all         *sync.Cond
	size, count int
	turn        int
}

func newMeeting(n int) *meeting {
	m := &meeting{size: n}
	m.all = sync.NewCond(&m.mu)
	return m
}

func (m *meeting) wait() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.count++
	turn := m.turn
	if m.count == m.size {
		m.count, m.turn = 0, turn+1
		m.all.Broadcast()
	}
	for m.turn == turn {
		m.all.Wait()
	}
}

// probe times a device.
type probe struct {
	d       device.Device
	s       device.Stream
	meet    *meeting
	buffers []device.Buffer
	other   tensor.Tensor // for forget
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

// forget fills a core's caches with other memory than the call's. In a step no operation follows
// itself, so its operands are not in the caches.
func (p *probe) forget() {
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

// rate repeats a call of so much work, after a first one that does not count, and is its work a
// second in the best lap. All devices begin together, and all take part whether they failed or not.
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
	p.meet.wait()
	for began := time.Now(); p.err == nil && time.Since(began) < repeat; {
		n, spent := 0.0, time.Duration(0)
		for p.err == nil && spent < lap && (n == 0 || time.Since(began) < repeat) {
			p.forget()
			start := time.Now()
			once()
			spent += time.Since(start)
			n++
		}
		best = max(best, n*work/spent.Seconds())
	}
	p.meet.wait()
	return best
}

// rows returns the number of tokens of the measured work.
const rows = 1024

func (p *probe) products(x Shape) float64 {
	dt := x.Compute
	a, w, c := p.tensor(dt, rows, x.Hidden), p.tensor(dt, x.Hidden, x.Hidden), p.tensor(dt, rows, x.Hidden)
	gemm := device.Gemm{A: a, B: w.Permute(1, 0), C: c}
	return p.rate(2*rows*float64(x.Hidden)*float64(x.Hidden), func() error { return p.d.Gemm(p.s, &gemm) })
}

// layers returns the rate of the matrix products of a layer: forward and both gradients, for a
// square and a wide matrix. The number of tokens is a rank's, limited so that a call takes at most
// moment.
func (p *probe) layers(x Shape) float64 {
	wide := cmp.Or(x.Wide, x.Hidden)
	all := 6 * float64(x.Hidden) * float64(x.Hidden+wide) // FLOP of a token
	tokens := max(64, min(cmp.Or(x.Tokens, rows), int64(moment/all)))
	var calls []device.Gemm
	for _, n := range []int64{x.Hidden, wide} {
		in, out, w := p.tensor(x.Compute, tokens, x.Hidden), p.tensor(x.Compute, tokens, n), p.tensor(x.Compute, n, x.Hidden)
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

func (p *probe) rates(x Shape) (r Rates) {
	p.s, p.err = p.d.NewStream()
	dt := x.Compute
	r.Products = p.layers(x)

	const heads = 4
	rows := max(256, min(cmp.Or(x.Sequence, rows), int64(math.Sqrt(moment/float64(2*heads*x.Dim)))))
	q := device.AttentionGrad{Attention: device.Attention{CuQ: []int64{0, rows}, CuK: []int64{0, rows}, Causal: true, Scale: 0.1}}
	for _, t := range []*tensor.Tensor{&q.Q, &q.K, &q.V, &q.Out, &q.DOut, &q.DQ, &q.DK, &q.DV} {
		if *t = p.tensor(dt, rows, heads, x.Dim); !p.d.Info().TokenMajor {
			*t = p.tensor(dt, heads, rows, x.Dim).Permute(1, 0, 2)
		}
	}
	q.LSE = p.tensor(tensor.F32, rows, heads)
	q.Workspace = p.tensor(tensor.U8, max(1, p.d.AttentionWorkspace(&q.Attention, false), p.d.AttentionWorkspace(&q.Attention, true)))
	flops := attentionFlops(&q.Attention)
	r.Attention = p.rate(flops, func() error { return p.d.AttentionForward(p.s, &q.Attention) })
	r.Gradient = p.rate(2.5*flops, func() error { return p.d.AttentionBackward(p.s, &q) })

	if r.Delta = 1; x.KeyDim > 0 {
		p.delta(x, heads, &r)
	}

	const most = 64 << 20 // largest size of a tensor in bytes
	wide := max(64, min(cmp.Or(x.Tokens, rows), most/(x.Hidden*dt.Size())))
	gate, up, y := p.tensor(dt, wide, x.Hidden), p.tensor(dt, wide, x.Hidden), p.tensor(dt, wide, x.Hidden)
	weight, rstd, dw := p.tensor(dt, x.Hidden), p.tensor(tensor.F32, wide), p.tensor(tensor.F32, x.Hidden)
	norm, swiglu := device.RMSNorm{X: y, W: weight, Y: gate, RStd: rstd, Eps: 1e-6}, device.SwiGLU{Gate: gate, Up: up, Y: y}
	dnorm := device.RMSNormGrad{X: y, W: weight, RStd: rstd, DY: gate, DX: up, DW: dw, AddDX: true}
	dswiglu := device.SwiGLUGrad{Gate: gate, Up: up, DY: y, DGate: gate, DUp: up}
	tensors, seconds := 0.0, 0.0 // as pass counts them
	for _, op := range []struct {
		tensors float64
		call    func() error
	}{{3, func() error { return p.d.SwiGLUForward(p.s, &swiglu) }}, {2, func() error { return p.d.RMSNormForward(p.s, &norm) }},
		{4, func() error { return p.d.RMSNormBackward(p.s, &dnorm) }}, {5, func() error { return p.d.SwiGLUBackward(p.s, &dswiglu) }}} {
		tensors += op.tensors
		seconds += op.tensors / p.rate(op.tensors*float64(y.Bytes()), op.call)
	}
	r.Memory = tensors / seconds
	r.Copies = p.rate(float64(y.Bytes()), func() error { return p.d.Copy(p.s, up, y) })
	return r
}

// delta measures the gated delta rule, forward and backward, and the convolution before it.
func (p *probe) delta(x Shape, heads int64, r *Rates) {
	dt := x.Compute
	of := func(width int64) tensor.Tensor { return p.tensor(dt, rows, heads, width) }
	gates := func() tensor.Tensor { return p.tensor(tensor.F32, rows, heads) }
	channels := heads * (2*x.KeyDim + x.ValueDim)
	parts := func() (q, k, v tensor.Tensor) { // channels of the convolution as in a layer
		all, keys := p.tensor(dt, rows, channels), heads*x.KeyDim
		part := func(lo, hi, width int64) tensor.Tensor {
			t := all.Slice(1, lo, hi)
			t.NDim, t.Shape[1], t.Shape[2], t.Stride[1], t.Stride[2] = 3, heads, width, width, 1
			return t
		}
		return part(0, keys, x.KeyDim), part(keys, 2*keys, x.KeyDim), part(2*keys, channels, x.ValueDim)
	}
	g := device.GatedDeltaGrad{GatedDelta: device.GatedDelta{Out: of(x.ValueDim), G: gates(), Beta: gates(), Cu: []int64{0, rows}, L2Norm: true, Scale: 0.1},
		DOut: of(x.ValueDim), DG: gates(), DBeta: gates()}
	g.Q, g.K, g.V = parts()
	g.DQ, g.DK, g.DV = parts()
	sizes := p.d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = p.tensor(tensor.U8, max(1, sizes.Saved)), p.tensor(tensor.U8, max(1, sizes.Forward, sizes.Backward))
	flops := deltaFlops(g.K, g.V, 0)
	r.Delta = p.rate(flops, func() error { return p.d.GatedDeltaForward(p.s, &g.GatedDelta) })
	r.DeltaBack = p.rate(2.5*flops, func() error { return p.d.GatedDeltaBackward(p.s, &g) })

	const taps = 4
	c := device.Conv1dGrad{Conv1d: device.Conv1d{X: p.tensor(dt, rows, channels), Y: p.tensor(dt, rows, channels), W: p.tensor(dt, channels, taps), Cu: []int64{0, rows}},
		DY: p.tensor(dt, rows, channels), DX: p.tensor(dt, rows, channels), DW: p.tensor(tensor.F32, channels, taps)}
	forward := p.rate(float64(2*c.X.Bytes()), func() error { return p.d.Conv1dForward(p.s, &c.Conv1d) })
	r.Stencil = 5 / (2/forward + 3/p.rate(float64(3*c.X.Bytes()), func() error { return p.d.Conv1dBackward(p.s, &c) }))
}
