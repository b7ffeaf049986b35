package model

import (
	"ulysses/device"
	"ulysses/tensor"
	"ulysses/tile"
)

// Rows of logits in a tile, where nobody says.
const (
	lossTileMin = 128
	lossTileMax = 4096
)

// head is the final norm and the projection to the vocabulary, with the loss. The logits exist a
// tile of rows at a time, in F32, and so do their gradients, in the compute type: where that is F32
// they take the logits' place. The backward half of a tile comes right behind its forward half,
// while the logits are there.
type head struct {
	norm   *Param
	matrix linear // [V, hidden]; the embedding's table when tied
	tied   bool
	eps    float64

	p               *pass
	logits, dlogits tensor.Tensor // [tile, V] F32, and of the compute type
	compute         tile.Compute
}

func newHead(cfg *Config, norm, matrix *Param) *head {
	h := &head{norm: norm, matrix: newLinear([]*Param{matrix}, nil), tied: cfg.TieWordEmbeddings, eps: cfg.RMSNormEps}
	h.compute = tile.Compute{In: make([]tile.Operand, 2), Out: make([]tile.Operand, 2), Body: h}
	return h
}

// tileRows is the rows of a tile on a device, 0 for all.
func (h *head) tileRows(d device.Device, t Tiles) int64 {
	switch t.Loss {
	case TileOff:
		return 0
	case TileAuto:
		return max(lossTileMin, min(lossTileMax, tileBytes(d)/(4*h.matrix.out)))
	}
	return t.Loss
}

// run sums the negative log likelihoods of x [T, hidden] into sum (F64, one element). In a pass
// with a backward half it returns the gradient of x, which takes the place of p.act; p.act takes
// that of x.
func (h *head) run(p *pass, x, sum tensor.Tensor) tensor.Tensor {
	p.phase("norm")
	p.Norm(p.act, x, h.norm, p.rstd, h.eps)
	p.inspect("norm's output", "", p.act)
	p.end()
	p.phase("loss")
	mark, rows := p.mark(), h.tileRows(p.dev, p.tiles)
	nll := p.stat(p.rows) // the sum is over all rows at once, so that tiles leave no trace in it
	h.logits = p.stat(tile.Room(p.rows, rows), h.matrix.out)
	h.dlogits = h.logits
	if p.backward && p.compute != tensor.F32 {
		h.dlogits = p.temp(tile.Room(p.rows, rows), h.matrix.out)
	}
	h.p, h.compute.Plan, h.compute.Fused = p, p.tilePlan(rows), p.backward
	h.compute.In[0], h.compute.In[1] = tile.Cut(p.act, 0), tile.Cut(p.batch.Targets, 0)
	h.compute.Out[0], h.compute.Out[1] = tile.Cut(nll, 0), tile.Cut(p.act, 0) // p.act: its gradient
	p.tiled(&h.compute, nil, nil)
	p.inspect("loss of each token", "", nll)
	p.Sum(sum, nll)
	p.reset(mark)
	p.end()
	if !p.backward {
		return x
	}
	p.phase("norm")
	p.NormBack(p.act, p.act, x, h.norm, p.rstd, false)
	p.end()
	d := p.act
	p.act = x
	return d
}

// Forward is a tile of both halves.
func (h *head) Forward(t *tile.Tile) error {
	if t.Rows() == 0 {
		return nil
	}
	p, act, logits, dlogits := h.p, t.In[0], h.logits.Slice(0, 0, t.Rows()), h.dlogits.Slice(0, 0, t.Rows())
	h.matrix.forward(p, logits, act)
	p.CrossEntropy(t.Out[0], logits, dlogits, t.In[1])
	if p.backward {
		h.matrix.addWeights(p, dlogits, act)
		h.matrix.backwardInput(p, t.Out[1], dlogits)
	}
	return p.err
}

// Backward is never asked for: the computation is fused.
func (h *head) Backward(*tile.Tile) error { return nil }

// Complete announces the gradient of the matrix; to a tied one the embedding has more to add.
func (h *head) Complete() error {
	if !h.tied {
		h.matrix.ready(h.p)
	}
	return h.p.err
}
