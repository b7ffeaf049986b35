package rehearsal

import (
	"sync"
	"time"

	"ulysses/device"
	"ulysses/tensor"
)

// Shape is the work that rates are measured on: rates depend on the widths of heads and rows.
type Shape struct {
	Compute          tensor.DType
	Hidden           int64 // features of a token
	Dim              int64 // of an attention head
	KeyDim, ValueDim int64 // of a head of the gated delta rule; 0 = there are none
}

// In is the shape computed in a type.
func (x Shape) In(compute tensor.DType) Shape {
	x.Compute = compute
	return x
}

// Each kind of work is repeated for a time, lap after lap. The best lap counts: what else the machine does meanwhile is not the plan's.
const (
	repeat = 60 * time.Millisecond
	lap    = 5 * time.Millisecond
)

// Measure times each kind of work on devices that work at the same time, one for each rank of a node, and is what one of them gets done on average. It takes
// about a second. What moves between ranks of the node is taken to go at half a copy's rate; there is no network to measure.
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
		mean.Memory += r.Memory / n
		mean.Copies += r.Copies / n
	}
	mean.Node, mean.Network = mean.Copies/2, mean.Copies/2
	return mean, nil
}

// MeasureProducts times matrix products on one device and returns their FLOP/s in the best lap. It takes about 60 ms.
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
	return t
}

// rate repeats a call of so much work, after a first one that does not count, and is its work a second in the best lap. All devices begin together, and
// all take part whether they failed or not.
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
		n, start := 0.0, time.Now()
		for p.err == nil && time.Since(start) < lap {
			once()
			n++
		}
		best = max(best, n*work/time.Since(start).Seconds())
	}
	p.meet.wait()
	return best
}

// rows is how many tokens the measured work has.
const rows = 1024

func (p *probe) products(x Shape) float64 {
	dt := x.Compute
	a, w, c := p.tensor(dt, rows, x.Hidden), p.tensor(dt, x.Hidden, x.Hidden), p.tensor(dt, rows, x.Hidden)
	gemm := device.Gemm{A: a, B: w.Permute(1, 0), C: c}
	return p.rate(2*rows*float64(x.Hidden)*float64(x.Hidden), func() error { return p.d.Gemm(p.s, &gemm) })
}

func (p *probe) rates(x Shape) (r Rates) {
	p.s, p.err = p.d.NewStream()
	dt := x.Compute
	r.Products = p.products(x)

	const heads = 4
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
		r.Delta = p.delta(x, rows, heads)
	}

	const most = 16 << 20 // bytes, more than a core's share of the caches
	wide := max(rows, most/(x.Hidden*dt.Size()))
	gate, up, y := p.tensor(dt, wide, x.Hidden), p.tensor(dt, wide, x.Hidden), p.tensor(dt, wide, x.Hidden)
	weight, rstd := p.tensor(dt, x.Hidden), p.tensor(tensor.F32, wide)
	norm, swiglu := device.RMSNorm{X: y, W: weight, Y: gate, RStd: rstd, Eps: 1e-6}, device.SwiGLU{Gate: gate, Up: up, Y: y}
	r.Memory = p.rate(float64(5*y.Bytes()), func() error {
		if err := p.d.SwiGLUForward(p.s, &swiglu); err != nil {
			return err
		}
		return p.d.RMSNormForward(p.s, &norm)
	})
	r.Copies = p.rate(float64(y.Bytes()), func() error { return p.d.Copy(p.s, up, y) })
	return r
}

func (p *probe) delta(x Shape, rows, heads int64) float64 {
	dt := x.Compute
	g := device.GatedDelta{Q: p.tensor(dt, rows, heads, x.KeyDim), K: p.tensor(dt, rows, heads, x.KeyDim), V: p.tensor(dt, rows, heads, x.ValueDim),
		Out: p.tensor(dt, rows, heads, x.ValueDim), G: p.tensor(tensor.F32, rows, heads), Beta: p.tensor(tensor.F32, rows, heads), Cu: []int64{0, rows}, L2Norm: true, Scale: 0.1}
	sizes := p.d.GatedDeltaSizes(&g)
	g.Saved, g.Workspace = p.tensor(tensor.U8, max(1, sizes.Saved)), p.tensor(tensor.U8, max(1, sizes.Forward))
	return p.rate(deltaFlops(g.K, g.V, 0), func() error { return p.d.GatedDeltaForward(p.s, &g) })
}
