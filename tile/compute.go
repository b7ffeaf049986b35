package tile

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Body computes one tile. Its methods are called for every tile of the plan, in order, also for
// empty ones, and equally often on every rank: a body may be collective. An error ends the
// computation and is its result.
type Body interface {
	// Forward writes the rows of tiled outputs and adds to sums and means. Memory that it needs
	// inside is reused for every tile.
	Forward(t *Tile) error
	// Backward recomputes from t.In what it needs of Forward, writes t.DIn of tiled inputs and adds
	// to t.DIn of whole ones. A nil DIn is not needed. A nil DOut is zero. t.Out and the inner
	// activations of Forward are not available.
	Backward(t *Tile) error
	// Complete is called once, after Backward of the last tile. The gradients of whole inputs are
	// complete then and may be sent.
	Complete() error
}

// Tile has the rows [Lo, Hi) of the current tile and its views of the operands. It is valid during
// the call.
type Tile struct {
	Index, Count int64
	Lo, Hi       int64
	In, Out      []tensor.Tensor // Out only in Forward
	DOut, DIn    []tensor.Tensor // only in Backward
	Valid        []int64         // by output: terms of a mean; Forward adds to it
	// Scale, by output, in Backward: the gradient of a tile's contribution is DOut·Scale. It is 1
	// except for means.
	Scale []float64
	// Zero, in Backward: all DOut are nil. The gradients of tiled inputs are set to zero already,
	// and the body must only take part in collectives.
	Zero bool
}

// Rows returns Hi - Lo.
func (t *Tile) Rows() int64 { return t.Hi - t.Lo }

// Last reports whether this is the last tile, which may be empty.
func (t *Tile) Last() bool { return t.Index == t.Count-1 }

// Compute is a tiled computation. It is reusable and allocates nothing after the first time. A
// tiled output may use the memory of an input that is tiled along the same axis, if the body reads
// a tile before it writes it. A gradient may use the memory of its tensor in the same way.
type Compute struct {
	Plan Plan
	In   []Operand
	Out  []Operand
	Body Body
	// Fused means that Body.Forward also computes the gradients, as outputs. Forward then calls
	// Complete at its end, and Backward must not be called.
	Fused  bool
	Ranks  comm.Comm // nil: means are over this rank's rows, else over the rows of all ranks
	Device device.Device
	Stream device.Stream

	tile    Tile
	forward bool // Forward is complete: the counts of means are set
}

// Forward runs Body.Forward for every tile. It is collective over Ranks if there are means, and
// whenever the body is.
func (c *Compute) Forward() error {
	c.forward = false
	if err := c.check(); err != nil {
		return err
	}
	t := &c.tile
	t.DOut, t.DIn, t.Zero = t.DOut[:0], t.DIn[:0], false
	for i := range c.Out {
		if o := &c.Out[i]; o.kind != tiled {
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

// Backward runs Body.Backward for every tile: from the gradients of the outputs, one for each, to
// the gradients of the inputs. A nil gradient of an output is zero; a nil gradient of an input is
// not needed. Gradients of tiled inputs are written; tiles add to gradients of whole inputs.
// Gradients of outputs are not changed. The same gradients are nil on all ranks.
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
		if t.Zero && c.In[i].kind == tiled && !din[i].IsNil() {
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

// walk calls f for every tile, after it has set the views of the inputs.
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

// views returns the tile's view of each operand, or of xs instead of the operands' tensors, in the
// memory of to.
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

// divide converts sums into means. The counts are kept for Backward, which scales by them.
// Collective over Ranks if there are means.
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

// check checks the operands and allocates the memory for counts.
func (c *Compute) check() error {
	if c.Plan.Count < 1 || c.Plan.Rows < 0 || c.Body == nil {
		return status.Errorf(status.InvalidArgument,
			"tile.Compute: %d rows in %d tiles, body %v; make the plan with NewPlan, and set Body",
			c.Plan.Rows, c.Plan.Count, c.Body)
	}
	for i := range c.In {
		if err := c.In[i].check("input", i, c.Plan.Rows, tiled, whole); err != nil {
			return err
		}
	}
	for i := range c.Out {
		if err := c.Out[i].check("output", i, c.Plan.Rows, tiled, sum, mean); err != nil {
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
		return status.Errorf(status.InvalidArgument,
			"tile.Compute: Backward of a fused computation, whose Forward computes the gradients; do not call it")
	}
	if len(dout) != len(c.Out) || len(din) != len(c.In) {
		return status.Errorf(status.InvalidArgument,
			"tile.Compute: %d gradients for %d outputs, %d for %d inputs; give one for each, nil for none",
			len(dout), len(c.Out), len(din), len(c.In))
	}
	for i := range dout {
		if err := c.Out[i].like("output", i, dout[i]); err != nil {
			return err
		}
		if c.Out[i].kind != mean {
			c.tile.Scale[i] = 1
		} else if !c.forward {
			return status.Errorf(status.InvalidArgument,
				"tile.Compute: Backward of a mean before Forward, which counts the terms; call Forward first")
		}
	}
	for i := range din {
		if err := c.In[i].like("input", i, din[i]); err != nil {
			return err
		}
	}
	return nil
}
