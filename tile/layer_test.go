package tile

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"ulysses/cpu"
	"ulysses/device"
	"ulysses/tensor"
)

// layer is y [B, S, M] = tanh(x [B, S, N]·w [N, M]) in plain Go, with the sum and the mean of c·y
// over the rows that mask selects; the mask is not an operand. Backward recomputes all inner
// activations.
type layer struct {
	calls    []string
	consumer *consumer // of the gradient of w
	fail     int64     // tile whose forward fails; -1 = none
}

func at(t tensor.Tensor, i ...int64) *float32 {
	n := int64(0)
	for a, x := range i {
		n += x * t.Stride[a]
	}
	x := t.Offset(n)
	x.NDim = 0
	return &tensor.Of(x.Data, tensor.F32, 1).Float32s()[0]
}

// cell returns tanh of one output.
func cell(x, w tensor.Tensor, b, s, m int64) float64 {
	z := 0.0
	for n := range w.Shape[0] {
		z += float64(*at(x, b, s, n)) * float64(*at(w, n, m))
	}
	return math.Tanh(z)
}

func (l *layer) Forward(t *Tile) error {
	l.calls = append(l.calls, fmt.Sprint("f", t.Lo, "-", t.Hi, " ", t.Index, "/", t.Count))
	if t.Index == l.fail {
		return errors.New("no")
	}
	x, w, mask, y := t.In[0], t.In[1], t.In[2], t.Out[0]
	for b := range x.Shape[0] {
		for s := range x.Shape[1] {
			for m := range w.Shape[1] {
				v := cell(x, w, b, s, m)
				*at(y, b, s, m) = float32(v)
				if *at(mask, b, s) != 0 {
					*at(t.Out[1], 0) += float32(v * float64(m+1))
					*at(t.Out[2], 0) += float32(v * float64(m+1))
				}
			}
			if *at(mask, b, s) != 0 {
				t.Valid[2]++
			}
		}
	}
	return nil
}

func (l *layer) Backward(t *Tile) error {
	l.calls = append(l.calls, fmt.Sprint("b", t.Lo, "-", t.Hi, " ", t.Index, "/", t.Count))
	if err := l.consumer.tile(t); err != nil || t.Zero {
		return err
	}
	x, w, mask := t.In[0], t.In[1], t.In[2]
	for b := range x.Shape[0] {
		for s := range x.Shape[1] {
			if !t.DIn[0].IsNil() {
				for n := range w.Shape[0] {
					*at(t.DIn[0], b, s, n) = 0
				}
			}
			for m := range w.Shape[1] {
				dy := 0.0
				if !t.DOut[0].IsNil() {
					dy += float64(*at(t.DOut[0], b, s, m))
				}
				for k := 1; k < 3; k++ {
					if !t.DOut[k].IsNil() && *at(mask, b, s) != 0 {
						dy += float64(*at(t.DOut[k], 0)) * t.Scale[k] * float64(m+1)
					}
				}
				v := cell(x, w, b, s, m)
				dz := dy * (1 - v*v)
				for n := range w.Shape[0] {
					if !t.DIn[0].IsNil() {
						*at(t.DIn[0], b, s, n) += float32(dz * float64(*at(w, n, m)))
					}
					if !t.DIn[1].IsNil() {
						*at(t.DIn[1], n, m) += float32(dz * float64(*at(x, b, s, n)))
					}
				}
			}
		}
	}
	return nil
}

func (l *layer) Complete() error { return l.consumer.complete() }

// consumer waits for complete gradients, as a trainer that reduces them over ranks. It fails if
// Complete is called twice or before the last tile. Tests check that it was called.
type consumer struct {
	tiles, count int64
	told         int
}

func (c *consumer) tile(t *Tile) error {
	if c.told > 0 {
		return errors.New("a tile after Complete")
	}
	if t.Index != c.tiles {
		return fmt.Errorf("tile %d is call %d", t.Index, c.tiles)
	}
	c.tiles, c.count = c.tiles+1, t.Count
	return nil
}

func (c *consumer) complete() error {
	if c.told++; c.told > 1 {
		return errors.New("gradients are complete twice")
	}
	if c.tiles != c.count || c.tiles == 0 {
		return fmt.Errorf("gradients are complete after %d of %d tiles", c.tiles, c.count)
	}
	return nil
}

// problem is one instance with all its tensors.
type problem struct {
	*Compute
	layer      *layer
	x, w, mask tensor.Tensor
	dout, din  []tensor.Tensor
}

func random(seed uint64, shape ...int64) tensor.Tensor {
	r := rand.New(rand.NewPCG(seed, 1))
	x := make([]float32, tensor.Of(nil, tensor.F32, shape...).Numel())
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return tensor.OfFloat32(x, shape...)
}

func zeros(shape ...int64) tensor.Tensor {
	return tensor.OfFloat32(make([]float32, tensor.Of(nil, tensor.F32, shape...).Numel()), shape...)
}

func host(t testing.TB) (device.Device, device.Stream) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(); d.Close() })
	return d, s
}

// newProblem returns the layer for rows [lo, hi) of S rows. The values do not depend on the
// sharding. Rows 2 to 5 are not valid.
func newProblem(t testing.TB, batch, all, lo, hi, tileRows, most int64) *problem {
	const n, m = 5, 3
	d, s := host(t)
	p := &problem{layer: &layer{consumer: &consumer{}, fail: -1}, x: random(1, batch, all, n).Slice(1, lo, hi),
		w: random(2, n, m)}
	mask := zeros(batch, all)
	for b := range batch {
		for i := range all {
			if i < 2 || i > 5 {
				*at(mask, b, i) = 1
			}
		}
	}
	p.mask = mask.Slice(1, lo, hi)
	plan, err := NewPlan(hi-lo, tileRows, most)
	if err != nil {
		t.Fatal(err)
	}
	y := random(9, batch, hi-lo, m) // garbage, to be overwritten
	p.Compute = &Compute{Plan: plan, In: []Operand{Tiled(p.x, 1), Whole(p.w), Tiled(p.mask, 1)},
		Out: []Operand{Tiled(y, 1), Sum(random(8, 1)), Mean(random(7, 1))}, Body: p.layer, Device: d, Stream: s}
	p.dout = []tensor.Tensor{random(3, batch, all, m).Slice(1, lo, hi), random(4, 1), random(5, 1)}
	p.din = []tensor.Tensor{random(6, batch, hi-lo, n), zeros(n, m), {}}
	return p
}

func (p *problem) run(t testing.TB) {
	t.Helper()
	if err := p.Forward(); err != nil {
		t.Fatal(err)
	}
	if err := p.Backward(p.dout, p.din); err != nil {
		t.Fatal(err)
	}
	if p.layer.consumer.told != 1 {
		t.Fatalf("gradients are complete %d times", p.layer.consumer.told)
	}
}

func values(t tensor.Tensor) []float32 {
	var x []float32
	var walk func(t tensor.Tensor)
	walk = func(t tensor.Tensor) {
		if t.NDim == 0 {
			x = append(x, *at(t))
			return
		}
		for i := range t.Shape[0] {
			walk(t.Select(0, i))
		}
	}
	walk(t)
	return x
}

func near(t testing.TB, what string, got, want tensor.Tensor) {
	t.Helper()
	g, w := values(got), values(want)
	if len(g) != len(w) {
		t.Fatalf("%s: %d values, want %d", what, len(g), len(w))
	}
	for i := range w {
		if !(math.Abs(float64(g[i]-w[i])) <= 1e-5*(1+math.Abs(float64(w[i])))) {
			t.Fatalf("%s: value %d is %v, want %v", what, i, g[i], w[i])
		}
	}
}
