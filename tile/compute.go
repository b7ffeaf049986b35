package tile

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Body is what is computed for each tile. Every tile of the plan comes, in order, empty ones too,
// on every rank equally often: a body may be collective. An error ends the walk and is its result.
type Body interface {
	// Forward writes the cut outputs' rows and adds to sums and means. What it needs inside is
	// memory that serves every tile in turn.
	Forward(t *Tile) error
	// Backward computes again what it needs of forward, from t.In, writes t.DIn of cut inputs and
	// adds to t.DIn of whole ones. A nil DIn is not wanted, a nil DOut is zero; neither t.Out nor
	// what forward left inside is there.
	Backward(t *Tile) error
	// Complete comes once, after the last tile's Backward: the gradients of everything whole have
	// all they will get, and may be sent off.
	Complete() error
}

// Tile is one tile under way: its rows [Lo, Hi) and its views of the operands. All of it lives for
// the call alone.
type Tile struct {
	Index, Count int64
	Lo, Hi       int64
	In, Out      []tensor.Tensor // Out in Forward alone
	DOut, DIn    []tensor.Tensor // in Backward alone
	Valid        []int64         // of each output: terms of a mean, to be added to in Forward
	// of each output, in Backward: what a tile added to it has the gradient DOut·Scale (1 but for
	// means)
	Scale []float64
	// in Backward: there is no DOut; cut gradients are zeroed already, and a body has to do what is
	// collective alone
	Zero bool
}

// Rows is Hi - Lo.
func (t *Tile) Rows() int64 { return t.Hi - t.Lo }

// Last reports the last tile, which may be empty.
func (t *Tile) Last() bool { return t.Index == t.Count-1 }

// Compute is a tiled computation. It is used again and again, and allocates nothing after the first
// time. An output that is cut may be an input that is cut along the same axis, if the body reads a
// tile before it writes it; so may a gradient and what it is the gradient of.
type Compute struct {
	Plan Plan
	In   []Operand
	Out  []Operand
	Body Body
	// Forward does the backward half too, gradients being outputs: Complete comes at its end, and
	// there is no Backward
	Fused  bool
	Ranks  comm.Comm // nil: means are over this rank's rows, else over those of all ranks
	Device device.Device
	Stream device.Stream

	tile    Tile
	forward bool // has come to its end: means have counts
}

// Forward runs every tile forward.
func (c *Compute) Forward() error {
	c.forward = false
	if err := c.check(); err != nil {
		return err
	}
	t := &c.tile
	t.DOut, t.DIn, t.Zero = t.DOut[:0], t.DIn[:0], false
	for i := range c.Out {
		if o := &c.Out[i]; o.kind != cut {
			if err := c.Device.Fill(c.Stream, o.T, 0); err != nil {
				return err
			}
		}
		t.Valid[i] = 0
	}
	err := c.walk(func(lo, hi int64) error {
		t.Out = views(t.Out, c.Out, nil, lo, hi)
		return c.Body.Forward(t)
	})
	if err == nil {
		err = c.divide()
	}
	if err != nil {
		return err
	}
	c.forward = true
	if c.Fused {
		return c.Body.Complete()
	}
	return nil
}

// Backward runs every tile backward: from the gradients of the outputs, one for each, to those of
// the inputs. A nil gradient of an output is zero, of an input not wanted. Cut ones are written,
// whole ones added to. No gradient of an output is changed. Which of them are nil is the same on
// all ranks.
func (c *Compute) Backward(dout, din []tensor.Tensor) error {
	if err := c.check(); err != nil {
		return err
	}
	if err := c.checkBackward(dout, din); err != nil {
		return err
	}
	t := &c.tile
	t.Out, t.Zero = t.Out[:0], true
	for i := range dout {
		t.Zero = t.Zero && dout[i].IsNil()
	}
	for i := range din {
		if t.Zero && c.In[i].kind == cut && !din[i].IsNil() {
			if err := c.Device.Fill(c.Stream, din[i], 0); err != nil {
				return err
			}
		}
	}
	err := c.walk(func(lo, hi int64) error {
		t.DOut, t.DIn = views(t.DOut, c.Out, dout, lo, hi), views(t.DIn, c.In, din, lo, hi)
		return c.Body.Backward(t)
	})
	if err != nil {
		return err
	}
	return c.Body.Complete()
}

// walk calls f for every tile with its inputs in view.
func (c *Compute) walk(f func(lo, hi int64) error) error {
	t := &c.tile
	t.Count = c.Plan.Count
	for t.Index = 0; t.Index < t.Count; t.Index++ {
		t.Lo, t.Hi = c.Plan.Bounds(t.Index)
		t.In = views(t.In, c.In, nil, t.Lo, t.Hi)
		if err := f(t.Lo, t.Hi); err != nil {
			return err
		}
	}
	return nil
}

// views puts the tile's part of each operand, or of xs in their place, into memory that is used
// again.
func views(to []tensor.Tensor, operands []Operand, xs []tensor.Tensor, lo, hi int64) []tensor.Tensor {
	to = to[:0]
	for i := range operands {
		x := operands[i].T
		if xs != nil {
			x = xs[i]
		}
		to = append(to, operands[i].view(x, lo, hi))
	}
	return to
}

// divide turns the sums of means into means. The counts stay for Backward: both halves weigh terms
// alike.
func (c *Compute) divide() error {
	t, any := &c.tile, false
	for i := range c.Out {
		any = any || c.Out[i].kind == mean
	}
	if any && c.Ranks != nil {
		if err := c.Ranks.AllReduce(nil, tensor.OfInt64(t.Valid, int64(len(t.Valid))), comm.Sum); err != nil {
			return err
		}
	}
	for i := range c.Out {
		o := &c.Out[i]
		t.Scale[i] = 1
		if o.kind != mean {
			continue
		}
		t.Scale[i] = 0
		if t.Valid[i] > 0 {
			t.Scale[i] = 1 / float64(t.Valid[i])
		}
		if c.Ranks != nil {
			if err := c.Ranks.AllReduce(c.Stream, o.T, comm.Sum); err != nil {
				return err
			}
		}
		if err := c.Device.Scale(c.Stream, o.T, t.Scale[i]); err != nil {
			return err
		}
	}
	return nil
}

// check looks at the operands and makes room for what is kept of them.
func (c *Compute) check() error {
	if c.Plan.Count < 1 || c.Plan.Rows < 0 || c.Body == nil {
		return status.Errorf(status.InvalidArgument, "tile.Compute: %d rows in %d tiles, body %v: make the plan with NewPlan, and give a body",
			c.Plan.Rows, c.Plan.Count, c.Body)
	}
	for i := range c.In {
		if err := c.In[i].check("input", i, c.Plan.Rows, cut, whole); err != nil {
			return err
		}
	}
	for i := range c.Out {
		if err := c.Out[i].check("output", i, c.Plan.Rows, cut, sum, mean); err != nil {
			return err
		}
	}
	if n := len(c.Out); len(c.tile.Valid) != n {
		c.tile.Valid, c.tile.Scale = make([]int64, n), make([]float64, n)
	}
	return nil
}

func (c *Compute) checkBackward(dout, din []tensor.Tensor) error {
	if c.Fused {
		return status.Errorf(status.InvalidArgument, "tile.Compute: Backward of a fused computation: its Forward has done it")
	}
	if len(dout) != len(c.Out) || len(din) != len(c.In) {
		return status.Errorf(status.InvalidArgument, "tile.Compute: %d gradients of %d outputs, %d of %d inputs: give one for each, nil where there is none",
			len(dout), len(c.Out), len(din), len(c.In))
	}
	for i := range dout {
		if err := c.Out[i].like("output", i, dout[i]); err != nil {
			return err
		}
		if c.Out[i].kind != mean {
			c.tile.Scale[i] = 1
		} else if !c.forward {
			return status.Errorf(status.InvalidArgument, "tile.Compute: Backward of a mean without its Forward, which counts the terms: call that first")
		}
	}
	for i := range din {
		if err := c.In[i].like("input", i, din[i]); err != nil {
			return err
		}
	}
	return nil
}
