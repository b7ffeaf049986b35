package model

import (
	"ulysses/tensor"
	"ulysses/tile"
)

// tokenwise is a computation that is local to a token, an MLP or experts, which mlpTiles runs one
// tile of tokens at a time.
type tokenwise interface {
	// begin allocates working memory for tiles of at most so many tokens. In a dry run it also
	// allocates what the calls for a tile allocate, because these are not made.
	begin(p *pass, tokens int64, backward bool)
	// forwardTile writes the output of x [tile, hidden] to out, which may be x. lo is the number of
	// the first token.
	forwardTile(p *pass, out, x tensor.Tensor, lo int64)
	// backwardTile adds to the gradients of the weights and writes that of x to dx, which may be x.
	backwardTile(p *pass, dx, x, dy tensor.Tensor, lo int64)
	// gradReady reports the gradients of the weights.
	gradReady(p *pass)
}

// mlpTiles computes an MLP one tile of tokens at a time. Its intermediate tensors have the size of
// a tile, and nothing is saved: the backward half gets the MLP's input from the block.
type mlpTiles struct {
	m       tokenwise
	p       *pass
	compute tile.Compute
	dout    []tensor.Tensor
	din     []tensor.Tensor
	// a tile sends rows to other ranks, so ranks have the same number of tiles, and a rank computes
	// also tiles in which it has no tokens
	collective bool
}

func newMLPTiles(m tokenwise) *mlpTiles {
	t := &mlpTiles{m: m, dout: make([]tensor.Tensor, 1), din: make([]tensor.Tensor, 1)}
	t.compute = tile.Compute{In: make([]tile.Operand, 1), Out: make([]tile.Operand, 1), Body: t}
	return t
}

// run computes the forward half, or if dy is given the backward half, of x [T, hidden] in place,
// see Mixer. A tile has the given number of tokens, 0 = all.
func (t *mlpTiles) run(p *pass, tokens int64, x, dy tensor.Tensor) {
	mark := p.mark()
	if t.p = p; t.collective {
		t.m.begin(p, tile.MaxTileRows(p.expertTokens, tokens), !dy.IsNil())
		t.compute.Plan = p.tilePlan(tokens, p.expertTokens)
	} else {
		t.m.begin(p, tile.MaxTileRows(p.tokens, tokens), !dy.IsNil())
		t.compute.Plan = p.tilePlan(tokens, p.maxTokens())
	}
	t.compute.In[0], t.compute.Out[0] = tile.Tiled(x, 0), tile.Tiled(x, 0)
	p.phase("mlp")
	if dy.IsNil() {
		p.tiled(&t.compute, nil, nil)
	} else {
		t.dout[0], t.din[0] = dy, x
		p.tiled(&t.compute, t.dout, t.din)
	}
	p.first = 0
	p.end()
	p.reset(mark)
}

// Forward overwrites the x of a tile with its output.
func (t *mlpTiles) Forward(at *tile.Tile) error {
	if t.p.first = at.Lo; at.Rows() > 0 || t.collective {
		t.m.forwardTile(t.p, at.Out[0], at.In[0], at.Lo)
	}
	return t.p.err
}

// Backward adds to the gradients of the weights and overwrites the x of a tile with its gradient.
func (t *mlpTiles) Backward(at *tile.Tile) error {
	if t.p.first = at.Lo; at.Rows() > 0 || t.collective {
		t.m.backwardTile(t.p, at.DIn[0], at.In[0], at.DOut[0], at.Lo)
	}
	return t.p.err
}

// Complete reports the gradients of the weights.
func (t *mlpTiles) Complete() error {
	t.m.gradReady(t.p)
	return t.p.err
}

// begin allocates gate and up, and the input of down.
func (m *mlp) begin(p *pass, tokens int64, _ bool) {
	m.tileHidden, m.tileAct = p.temp(tokens, 2*m.width), p.temp(tokens, m.width)
	m.gateUp.sketch(p, tokens)
	m.down.sketch(p, tokens)
}

// project computes gate and up of a tile. y is memory for the input of down.
func (m *mlp) project(p *pass, x tensor.Tensor) (hidden, gate, up, y tensor.Tensor) {
	hidden, y = m.tileHidden.Slice(0, 0, x.Shape[0]), m.tileAct.Slice(0, 0, x.Shape[0])
	gate, up = m.split(hidden)
	m.gateUp.forward(p, hidden, x)
	return hidden, gate, up, y
}

func (m *mlp) forwardTile(p *pass, out, x tensor.Tensor, _ int64) {
	_, gate, up, y := m.project(p, x)
	p.SwiGLU(y, gate, up, m.form)
	m.down.forward(p, out, y)
}

func (m *mlp) backwardTile(p *pass, dx, x, dy tensor.Tensor, _ int64) {
	hidden, gate, up, y := m.project(p, x)
	m.down.backwardInput(p, y, dy)
	p.SwiGLUBack(y, gate, up, m.form)
	m.down.addWeights(p, dy, y)
	m.gateUp.addWeights(p, hidden, x)
	m.gateUp.backwardInput(p, dx, hidden)
}

func (m *mlp) gradReady(p *pass) {
	m.down.gradReady(p)
	m.gateUp.gradReady(p)
}
