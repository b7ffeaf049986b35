package model

import (
	"ulysses/tensor"
	"ulysses/tile"
)

// mlpTiles is an MLP whose rows are computed a tile at a time: nothing is kept for backward but the
// layer's input, which the block computes again in any case. Memory inside is that of one tile.
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

// run is either half over x [T, hidden], which it overwrites as Mixer says, in tiles of so many
// rows, 0 = all; backward where there is a gradient.
func (t *mlpTiles) run(p *pass, rows int64, x, dy tensor.Tensor) {
	mark, m := p.mark(), t.m
	room := tile.Room(p.rows, rows)
	t.hidden, t.y = p.temp(room, 2*m.width), p.temp(room, m.width)
	t.p, t.compute.Plan = p, p.tilePlan(rows)
	t.compute.In[0], t.compute.Out[0] = tile.Cut(x, 0), tile.Cut(x, 0)
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

// widen computes gate and up of a tile; y has room for silu(gate)·up.
func (t *mlpTiles) widen(x tensor.Tensor) (hidden, gate, up, y tensor.Tensor) {
	hidden, y = t.hidden.Slice(0, 0, x.Shape[0]), t.y.Slice(0, 0, x.Shape[0])
	gate, up = t.m.split(hidden)
	t.m.gateUp.forward(t.p, hidden, x)
	return hidden, gate, up, y
}

// Forward is down(silu(gate(x))·up(x)) of a tile, over x.
func (t *mlpTiles) Forward(at *tile.Tile) error {
	if at.Rows() > 0 {
		_, gate, up, y := t.widen(at.In[0])
		t.p.SwiGLU(y, gate, up)
		t.m.down.forward(t.p, at.Out[0], y)
	}
	return t.p.err
}

// Backward adds the tile's part of the gradients of the weights and writes that of x over x.
func (t *mlpTiles) Backward(at *tile.Tile) error {
	if at.Rows() > 0 {
		m, p, x, dy := t.m, t.p, at.In[0], at.DOut[0]
		hidden, gate, up, y := t.widen(x)
		m.down.backwardInput(p, y, dy)
		p.SwiGLUBack(y, gate, up)
		m.down.addWeights(p, dy, y)
		m.gateUp.addWeights(p, hidden, x)
		m.gateUp.backwardInput(p, at.DIn[0], hidden)
	}
	return t.p.err
}

// Complete announces the gradients of the weights.
func (t *mlpTiles) Complete() error {
	t.m.down.ready(t.p)
	t.m.gateUp.ready(t.p)
	return t.p.err
}
