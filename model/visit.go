package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// category is the purpose of a saved activation. The names are the keys of the job's [memory]
// table.
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

// saving is what a pass saves for its backward half, and where.
type saving struct {
	*offloader // of categories that are offloaded
	policy     [categories]Policy
	actions    [categories]action // of the next visit
	savedBytes [categories]int64  // kept in the arena
	measuring  bool               // the visit adds up the bytes that are offloaded
	meter      device.Allocator
	visited    int64 // layers that the backward half has begun
}

// begin prepares a pass.
func (s *saving) begin(o *offloader, policy [categories]Policy) {
	*s = saving{offloader: o, policy: policy}
}

// setActions sets the actions of the next visit.
func (s *saving) setActions(inAttention, inQKV, inMLP action) {
	s.actions = [categories]action{qkv: inQKV, attention: inAttention, mlpSaved: inMLP}
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

// visitF32 is visit for an F32 tensor.
func (p *pass) visitF32(t *tensor.Tensor, k category, shape ...int64) {
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
		before := p.mark()
		*t = p.alloc(dtype, shape...)
		if p.policy[k] == Keep {
			p.savedBytes[k] += p.mark() - before
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
