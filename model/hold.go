package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// kind says what saved memory is for, after the keys of the job's [memory] table.
type kind uint8

const (
	blockInput kind = iota // the residual stream before a layer
	qkv
	attention
	mlpKind // the residual stream before the MLP, gate and up
	kinds
)

var kindNames = [kinds]string{"block input", "qkv", "attention", "mlp"}

// turn is what a walk over a layer's tensors does with those of a kind.
type turn uint8

const (
	leave turn = iota // they are there, or not, as before
	drop              // they are not kept: Nil
	take              // they get memory
)

// turns begins a walk.
func (p *pass) turns(inAttention, inQKV, inMLP turn) {
	p.turn = [kinds]turn{qkv: inQKV, attention: inAttention, mlpKind: inMLP}
}

// keeping begins the walk before a layer's forward half: what is kept or offloaded gets memory.
func (p *pass) keeping() {
	for k, f := range p.fate {
		if p.turn[k] = take; f == Recompute || !p.backward {
			p.turn[k] = drop
		}
	}
}

// hold gives a tensor of a kind its memory, if it is its kind's turn: of the compute type.
func (p *pass) hold(t *tensor.Tensor, k kind, shape ...int64) { p.holdAs(t, k, p.compute, shape...) }

// holdStat is hold of F32, holdBytes of bytes.
func (p *pass) holdStat(t *tensor.Tensor, k kind, shape ...int64) {
	p.holdAs(t, k, tensor.F32, shape...)
}
func (p *pass) holdBytes(t *tensor.Tensor, k kind, n int64) { p.holdAs(t, k, tensor.U8, n) }

func (p *pass) holdAs(t *tensor.Tensor, k kind, dtype tensor.DType, shape ...int64) {
	switch {
	case p.measuring:
		if p.fate[k] == Offload {
			p.meter.Take(dtype, shape...)
		}
	case p.turn[k] == drop:
		*t = tensor.Tensor{}
	case p.turn[k] == take && p.fate[k] == Offload:
		*t = p.layers.take(dtype, shape...)
	case p.turn[k] == take:
		before := p.c.Arena.Mark()
		*t = p.take(dtype, shape...)
		if p.fate[k] == Keep {
			p.saved[k] += p.c.Arena.Mark() - before
		}
	}
}

// or is a tensor that is held, else memory until the next reset.
func (p *pass) or(t tensor.Tensor, shape ...int64) tensor.Tensor {
	if t.IsNil() {
		return p.temp(shape...)
	}
	return t
}

// measure is the bytes that a layer offloads.
func (p *pass) measure(b *block) int64 {
	p.measuring, p.meter = true, device.Carver{Align: p.dev.Info().Align}
	b.hold(p)
	p.measuring = false
	return p.meter.Padded()
}
