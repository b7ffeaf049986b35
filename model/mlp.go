package model

import (
	"fmt"

	"ulysses/tensor"
)

// mlp is down(silu(gate(x))·up(x)), or with GELU instead of SiLU. Its halves work in place, see
// Mixer.
type mlp struct {
	gateUp, down linear
	form         form
	width        int64         // F, features of gate and of up
	hidden       tensor.Tensor // [T, 2F], gate and up, then their gradients
	tiles        *mlpTiles

	tileHidden, tileAct tensor.Tensor // [tile, 2F] and [tile, F], of the current tile
}

func newMLP(cfg *Config, layer int64) *mlp {
	name := func(suffix string) string { return fmt.Sprintf("model.layers.%d.mlp.%s", layer, suffix) }
	wide := []string{"intermediate_size", "hidden_size"}
	matrix := func(suffix string) *Param {
		return newParam(name(suffix), cfg.DType, normal, wide, cfg.IntermediateSize, cfg.HiddenSize)
	}
	up := []*Param{matrix("gate_proj.weight"), matrix("up_proj.weight")}
	down := []*Param{newParam(name("down_proj.weight"), cfg.DType, normal, []string{wide[1], wide[0]}, cfg.HiddenSize,
		cfg.IntermediateSize)}
	var upBias, downBias []*Param
	if cfg.MLPBias {
		upBias = []*Param{
			newParam(name("gate_proj.bias"), cfg.DType, zeros, wide[:1], cfg.IntermediateSize),
			newParam(name("up_proj.bias"), cfg.DType, zeros, wide[:1], cfg.IntermediateSize),
		}
		downBias = []*Param{newParam(name("down_proj.bias"), cfg.DType, zeros, wide[1:], cfg.HiddenSize)}
	}
	m := &mlp{gateUp: newLinear(up, upBias), down: newLinear(down, downBias), form: cfg.family.activation.form(),
		width: cfg.IntermediateSize}
	m.tiles = newMLPTiles(m)
	return m
}

func (m *mlp) Params() []*Param {
	ps := append(append([]*Param(nil), m.gateUp.w...), m.gateUp.b...)
	return append(append(ps, m.down.w...), m.down.b...)
}

// split returns views [T, F] of gate and up.
func (m *mlp) split(hidden tensor.Tensor) (gate, up tensor.Tensor) {
	return hidden.Slice(1, 0, m.width), hidden.Slice(1, m.width, 2*m.width)
}

// mlpTile returns the tokens of a tile, 0 = all, and whether the MLP runs in tiles. Then gate and
// up are not saved.
func (p *pass) mlpTile() (tokens int64, tiled bool) {
	if p.tiles.MLP > 0 {
		return p.tiles.MLP, true
	}
	return 0, p.backward && p.policy[mlpSaved] == Recompute
}

func (m *mlp) visitSaved(p *pass) {
	if _, tiled := p.mlpTile(); !tiled {
		p.visit(&m.hidden, mlpSaved, p.tokens, 2*m.width)
	}
}

func (m *mlp) Forward(p *pass, x tensor.Tensor) {
	if tokens, tiled := p.mlpTile(); tiled {
		m.tiles.run(p, tokens, x, tensor.Tensor{})
		return
	}
	mark := p.mark()
	hidden := p.or(m.hidden, p.tokens, 2*m.width)
	y := p.temp(p.tokens, m.width)
	gate, up := m.split(hidden)

	p.phase("mlp")
	m.gateUp.forward(p, hidden, x)
	p.SwiGLU(y, gate, up, m.form)
	m.down.forward(p, x, y)
	p.end()
	p.reset(mark)
}

// Backward recomputes the input of down in the memory of its gradient. Saving it would add half to
// the memory of gate and up.
func (m *mlp) Backward(p *pass, x, dy tensor.Tensor) {
	if tokens, tiled := p.mlpTile(); tiled {
		m.tiles.run(p, tokens, x, dy)
		return
	}
	mark := p.mark()
	y := p.temp(p.tokens, m.width)
	gate, up := m.split(m.hidden)

	p.phase("mlp")
	m.down.backwardInput(p, y, dy)
	p.SwiGLUBack(y, gate, up, m.form)
	m.down.backwardWeights(p, dy, y)
	m.gateUp.backwardWeights(p, m.hidden, x)
	m.gateUp.backwardInput(p, x, m.hidden)
	p.end()
	p.reset(mark)
}
