package model

import (
	"ulysses/tensor"
	"ulysses/tile"
)

// mlpTiles computes an MLP one tile of tokens at a time. Its intermediate tensors have the size of
// a tile, and nothing is saved: the backward half gets the MLP's input from the block.
type mlpTiles struct {
	m       *mlp
	p       *pass
	hidden  tensor.Tensor // [tile, 2F], gate and up
	y       tensor.Tensor // [tile, F]
	compute tile.Compute
	dout    []tensor.Tensor
	din     []tensor.Tensor
}

func newMLPTiles(m *mlp) *mlpTiles {
	t := &mlpTiles{m: m, dout: make([]tensor.Tensor, 1), din: make([]tensor.Tensor, 1)}
	t.compute = tile.Compute{In: make([]tile.Operand, 1), Out: make([]tile.Operand, 1), Body: t}
	return t
}

// run computes the forward half, or if dy is given the backward half, of x [T, hidden] in place,
// see Mixer. A tile has the given number of tokens, 0 = all.
func (t *mlpTiles) run(p *pass, tokens int64, x, dy tensor.Tensor) {
	mark, m := p.mark(), t.m
	room := tile.MaxTileRows(p.tokens, tokens)
	t.hidden, t.y = p.temp(room, 2*m.width), p.temp(room, m.width)
	t.p, t.compute.Plan = p, p.tilePlan(tokens)
	t.compute.In[0], t.compute.Out[0] = tile.Tiled(x, 0), tile.Tiled(x, 0)
	m.gateUp.sketch(p, room)
	m.down.sketch(p, room)
	p.phase("mlp")
	if dy.IsNil() {
		p.tiled(&t.compute, nil, nil)
	} else {
		t.dout[0], t.din[0] = dy, x
		p.tiled(&t.compute, t.dout, t.din)
	}
	p.end()
	p.reset(mark)
}

// project computes gate and up of a tile. y is memory for the input of down.
func (t *mlpTiles) project(x tensor.Tensor) (hidden, gate, up, y tensor.Tensor) {
	hidden, y = t.hidden.Slice(0, 0, x.Shape[0]), t.y.Slice(0, 0, x.Shape[0])
	gate, up = t.m.split(hidden)
	t.m.gateUp.forward(t.p, hidden, x)
	return hidden, gate, up, y
}

// Forward overwrites the x of a tile with its output.
func (t *mlpTiles) Forward(at *tile.Tile) error {
	if at.Rows() > 0 {
		_, gate, up, y := t.project(at.In[0])
		t.p.SwiGLU(y, gate, up, t.m.gelu)
		t.m.down.forward(t.p, at.Out[0], y)
	}
	return t.p.err
}

// Backward adds to the gradients of the weights and overwrites the x of a tile with its gradient.
func (t *mlpTiles) Backward(at *tile.Tile) error {
	if at.Rows() > 0 {
		m, p, x, dy := t.m, t.p, at.In[0], at.DOut[0]
		hidden, gate, up, y := t.project(x)
		m.down.backwardInput(p, y, dy)
		p.SwiGLUBack(y, gate, up, m.gelu)
		m.down.addWeights(p, dy, y)
		m.gateUp.addWeights(p, hidden, x)
		m.gateUp.backwardInput(p, at.DIn[0], hidden)
	}
	return t.p.err
}

// Complete reports the gradients of the weights.
func (t *mlpTiles) Complete() error {
	t.m.down.gradReady(t.p)
	t.m.gateUp.gradReady(t.p)
	return t.p.err
}
