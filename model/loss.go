package model

import (
	"cmp"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/tile"
)

// Limits of TileAuto for the loss: tokens in a tile.
const (
	lossTileMin = 128
	lossTileMax = 4096
)

// head is the final norm, the projection to the vocabulary, and the loss. Only the logits of one
// tile of tokens exist at a time, and their gradients, in the compute type. Logits are F32, or BF16
// if that is the compute type and the device's loss accepts it. Gradients of the same type
// overwrite the logits. The backward half of a tile follows its forward half directly, because it
// needs the logits.
type head struct {
	norm   *Param
	matrix linear // [V, hidden]; the table of the embedding if tied
	tied   bool
	eps    float64
	scale  float64 // of logits
	cap    float64 // of logits; 0 = none

	p               *pass
	logits, dlogits tensor.Tensor // [tile, V], and of the compute type
	compute         tile.Compute
}

func newHead(cfg *Config, norm, matrix *Param) *head {
	h := &head{norm: norm, matrix: newLinear([]*Param{matrix}, nil), tied: cfg.TieWordEmbeddings, eps: cfg.RMSNormEps,
		scale: cmp.Or(cfg.LogitsScale, 1), cap: cfg.LogitSoftcap}
	h.compute = tile.Compute{In: make([]tile.Operand, 2), Out: make([]tile.Operand, 2), Body: h}
	return h
}

// tileTokens returns the tokens of a tile on a device; 0 = all.
func (h *head) tileTokens(d device.Device, t Tiles, compute tensor.DType) int64 {
	switch t.Loss {
	case TileOff:
		return 0
	case TileAuto:
		return max(lossTileMin, min(lossTileMax, tileBytes(d)/(logitType(d, compute).Size()*h.matrix.out)))
	}
	return t.Loss
}

// logitType returns the type of logits on a device.
func logitType(d device.Device, compute tensor.DType) tensor.DType {
	if d.Info().LogitsBF16 {
		return compute
	}
	return tensor.F32
}

// run writes the sum of the negative log likelihoods of x [T, hidden] to sum [1] F64. In a pass
// with a backward half it returns the gradient of x, in the memory of p.act; the memory of x
// becomes p.act.
func (h *head) run(p *pass, x, sum tensor.Tensor) tensor.Tensor {
	p.phase("norm")
	p.Norm(p.act, x, h.norm, p.rstd, h.eps)
	p.inspect("norm's output", "", p.act)
	p.Scale(p.act, h.scale) // before the product: hidden_size values, not vocab_size
	p.end()
	p.phase("loss")
	mark, tokens := p.mark(), h.tileTokens(p.dev, p.tiles, p.compute)
	// summed over all tokens at once: the sum does not depend on the tiles
	nll := p.tempF32(p.tokens)
	h.logits = p.alloc(logitType(p.dev, p.compute), tile.MaxTileRows(p.tokens, tokens), h.matrix.out)
	h.dlogits = h.logits
	if p.backward && p.compute != h.logits.DType {
		h.dlogits = p.temp(tile.MaxTileRows(p.tokens, tokens), h.matrix.out)
	}
	h.p, h.compute.Plan, h.compute.Fused = p, p.tilePlan(tokens, p.maxTokens()), p.backward
	h.compute.In[0], h.compute.In[1] = tile.Tiled(p.act, 0), tile.Tiled(p.batch.Targets, 0)
	// p.act: its gradient
	h.compute.Out[0], h.compute.Out[1] = tile.Tiled(nll, 0), tile.Tiled(p.act, 0)
	p.tiled(&h.compute, nil, nil)
	p.inspect("loss of each token", "", nll)
	p.Sum(sum, nll)
	p.reset(mark)
	p.end()
	if !p.backward {
		return x
	}
	p.phase("norm")
	p.Scale(p.act, h.scale)
	p.NormBack(p.act, p.act, x, h.norm, p.rstd, false)
	p.end()
	d := p.act
	p.act = x
	return d
}

// Forward computes both halves of a tile.
func (h *head) Forward(t *tile.Tile) error {
	p, act, logits, dlogits := h.p, t.In[0], h.logits.Slice(0, 0, t.Rows()), tensor.Tensor{}
	if t.Rows() == 0 {
		p.inspect("logits", "", logits) // every rank inspects every tile
		return p.err
	}
	if p.backward {
		dlogits = h.dlogits.Slice(0, 0, t.Rows())
	}
	h.matrix.forward(p, logits, act)
	p.inspect("logits", "", logits)
	p.CrossEntropy(t.Out[0], logits, dlogits, t.In[1], p.batch.GradScale, h.cap)
	if p.backward {
		h.matrix.addWeights(p, dlogits, act)
		h.matrix.backwardInput(p, t.Out[1], dlogits)
	}
	return p.err
}

// Backward is not called, because the computation is fused.
func (h *head) Backward(*tile.Tile) error { return nil }

// Complete reports the gradient of the matrix. The gradient of a tied matrix is not complete yet:
// the embedding adds to it.
func (h *head) Complete() error {
	if !h.tied {
		h.matrix.gradReady(h.p)
	}
	return h.p.err
}
