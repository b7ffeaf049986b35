package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// category says what a saved activation is for. The names are the keys of the job's [memory] table.
type category uint8

const (
	blockInput category = iota // the residual stream before a layer
	qkv
	attention
	mlpSaved // the residual stream before the MLP, gate and up
	categories
)

var categoryNames = [categories]string{"block input", "qkv", "attention", "mlp"}

// action is what visitSaved does with the saved tensors of a category.
type action uint8

const (
	leave    action = iota // the tensors stay as they are, allocated or not
	free                   // the tensors become nil
	allocate               // the tensors get memory
)

// setActions sets the actions of the next visit.
func (p *pass) setActions(inAttention, inQKV, inMLP action) {
	p.actions = [categories]action{qkv: inQKV, attention: inAttention, mlpSaved: inMLP}
}

// allocateSaved sets the actions of the visit before a layer's forward half: categories that are
// kept or offloaded are allocated, all others are freed.
func (p *pass) allocateSaved() {
	for k, f := range p.policy {
		if p.actions[k] = allocate; f == Recompute || !p.backward {
			p.actions[k] = free
		}
	}
}

// visit applies the action of category k to t, a tensor of the compute type.
func (p *pass) visit(t *tensor.Tensor, k category, shape ...int64) {
	p.visitAs(t, k, p.compute, shape...)
}

// visitStat is visit for an F32 tensor.
func (p *pass) visitStat(t *tensor.Tensor, k category, shape ...int64) {
	p.visitAs(t, k, tensor.F32, shape...)
}

// visitBytes is visit for n bytes.
func (p *pass) visitBytes(t *tensor.Tensor, k category, n int64) { p.visitAs(t, k, tensor.U8, n) }

func (p *pass) visitAs(t *tensor.Tensor, k category, dtype tensor.DType, shape ...int64) {
	switch {
	case p.measuring:
		if p.policy[k] == Offload {
			p.meter.Take(dtype, shape...)
		}
	case p.actions[k] == free:
		*t = tensor.Tensor{}
	case p.actions[k] == allocate && p.policy[k] == Offload:
		*t = p.layers.alloc(dtype, shape...)
	case p.actions[k] == allocate:
		before := p.c.Arena.Mark()
		*t = p.alloc(dtype, shape...)
		if p.policy[k] == Keep {
			p.saved[k] += p.c.Arena.Mark() - before
		}
	}
}

// or returns t if it is allocated, otherwise a temporary tensor that is valid until the next reset.
func (p *pass) or(t tensor.Tensor, shape ...int64) tensor.Tensor {
	if t.IsNil() {
		return p.temp(shape...)
	}
	return t
}

// measure returns the bytes that a layer offloads.
func (p *pass) measure(b *block) int64 {
	p.measuring, p.meter = true, device.Allocator{Align: p.dev.Info().Align}
	b.visitSaved(p)
	p.measuring = false
	return p.meter.Padded()
}
