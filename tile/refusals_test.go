package tile

import (
	"errors"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/need"
)

// The error of a tile ends the computation and is its result. Complete is not called then, and a
// mean without counts has no Backward.
func TestFailingTile(t *testing.T) {
	p := newProblem(t, 1, 9, 0, 9, 2, 0)
	p.layer.fail = 2
	if err := p.Forward(); err == nil || err.Error() != "no" {
		t.Errorf("the error came back as %v", err)
	}
	if len(p.layer.calls) != 3 || p.layer.consumer.told != 0 {
		t.Errorf("calls %q, complete %d times", p.layer.calls, p.layer.consumer.told)
	}
	if err := p.Backward(p.dout, p.din); status.Of(err) != status.InvalidArgument {
		t.Errorf("backward of a mean without counts: %v", err)
	}
	p.layer.consumer.told = 1 // and a consumer that refuses is heard
	p.layer.fail = -1
	if err := p.Forward(); err != nil {
		t.Fatal(err)
	}
	if err := p.Backward(p.dout, p.din); err == nil {
		t.Error("a tile after completion passed")
	}
}

// fused computes the gradients in Forward.
type fused struct{ consumer }

func (f *fused) Forward(t *Tile) error  { return f.tile(t) }
func (f *fused) Backward(t *Tile) error { return errors.New("backward of a fused body") }
func (f *fused) Complete() error        { return f.complete() }

// A fused body is completed once, at the end of Forward, also without rows and operands.
func TestFused(t *testing.T) {
	d, s := host(t)
	for _, rows := range []int64{0, 1, 7} {
		f := &fused{}
		plan, _ := NewPlan(rows, 2, 9)
		c := &Compute{Plan: plan, Body: f, Fused: true, Device: d, Stream: s}
		if err := c.Forward(); err != nil || f.told != 1 {
			t.Errorf("%d rows: %v, complete %d times", rows, err, f.told)
		}
		if err := c.Backward(nil, nil); status.Of(err) != status.InvalidArgument {
			t.Errorf("backward: %v", err)
		}
	}
}

// Wrong operands are an error before the first tile.
func TestRefusals(t *testing.T) {
	for name, spoil := range map[string]func(p *problem){
		"rows":          func(p *problem) { p.Plan.Rows = 8 },
		"no plan":       func(p *problem) { p.Plan = Plan{} },
		"no body":       func(p *problem) { p.Body = nil },
		"axis":          func(p *problem) { p.In[0] = Tiled(p.x, 3) },
		"negative axis": func(p *problem) { p.In[0] = Tiled(p.x, -1) },
		"summed input":  func(p *problem) { p.In[1] = Sum(p.w) },
		"whole output":  func(p *problem) { p.Out[1] = Whole(p.w) },
		"no input":      func(p *problem) { p.In[0] = Tiled(tensor.Tensor{}, 0) },
		"mean of i32":   func(p *problem) { p.Out[2] = Mean(tensor.OfInt32(make([]int32, 1), 1)) },
		"dout shape":    func(p *problem) { p.dout[0] = p.dout[1] },
		"din shape":     func(p *problem) { p.din[1] = p.din[0] },
		"dout count":    func(p *problem) { p.dout = p.dout[:2] },
		"din count":     func(p *problem) { p.din = p.din[:2] },
	} {
		p := newProblem(t, 1, 9, 0, 9, 4, 0)
		spoil(p)
		err := p.Forward()
		if err == nil {
			p.layer.calls = nil
			err = p.Backward(p.dout, p.din)
		}
		if status.Of(err) != status.InvalidArgument || len(p.layer.calls) > 0 {
			t.Errorf("%s: %v, calls %q", name, err, p.layer.calls)
		}
	}
}

// still is a body that does nothing.
type still struct{}

func (still) Forward(*Tile) error  { return nil }
func (still) Backward(*Tile) error { return nil }
func (still) Complete() error      { return nil }

// Calls allocate nothing.
func TestNothingAllocated(t *testing.T) {
	need.ExactAllocations(t)
	p := newProblem(t, 1, 90, 0, 90, 4, 0)
	p.Body = still{}
	if n := testing.AllocsPerRun(10, func() {
		if p.Forward() != nil || p.Backward(p.dout, p.din) != nil {
			t.Fatal("a body that does nothing failed")
		}
	}); n > 0 {
		t.Errorf("%v allocations in a call", n)
	}
}

// The consumer of these tests fails if Complete is called early or twice.
func TestConsumer(t *testing.T) {
	early := &consumer{}
	if early.tile(&Tile{Index: 0, Count: 2}) != nil || early.complete() == nil {
		t.Error("complete after one tile of two passed")
	}
	if (&consumer{}).complete() == nil {
		t.Error("complete before any tile passed")
	}
	twice := &consumer{}
	if twice.tile(&Tile{Index: 0, Count: 1}) != nil || twice.complete() != nil || twice.complete() == nil {
		t.Error("complete twice passed")
	}
	if (&consumer{}).tile(&Tile{Index: 1, Count: 2}) == nil {
		t.Error("a tile out of turn passed")
	}
}
