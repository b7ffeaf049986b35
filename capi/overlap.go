package main

import "ulysses/tensor"

// seen is a tensor of the call under way.
type seen struct {
	name string
	t    tensor.Tensor
	out  bool // the call writes it
}

// note remembers a tensor of the call for overlaps.
func (c *context) note(name string, t tensor.Tensor, out bool) {
	if !t.IsNil() && t.Numel() > 0 {
		c.seen = append(c.seen, seen{name, t, out})
	}
}

// overlaps refuses what is written where something else of the call lies, or twice.
func (c *context) overlaps(op string) error {
	for i := range c.seen {
		a := &c.seen[i]
		if !a.out {
			continue
		}
		if !injective(&a.t) {
			return invalid("%s: %s is %v: its strides lay elements over each other", op, a.name, a.t)
		}
		for j := range c.seen {
			if b := &c.seen[j]; i != j && (i < j || !b.out) && !disjoint(&a.t, &b.t) {
				return invalid("%s: %s, which is written, and %s overlap in memory: give each its own", op, a.name, b.name)
			}
		}
	}
	return nil
}

// footprint is the bytes from the first to behind the last element, over axes with byte strides
// below limit.
func footprint(t *tensor.Tensor, limit int64) int64 {
	size := t.DType.Size()
	n := size
	for i := range int(t.NDim) {
		if s := t.Stride[i] * size; t.Shape[i] > 1 && s < limit {
			n += (t.Shape[i] - 1) * s
		}
	}
	return n
}

const noLimit = int64(1) << 62

// injective reports that each axis steps over all that finer axes hold.
func injective(t *tensor.Tensor) bool {
	size := t.DType.Size()
	for i := range int(t.NDim) {
		if t.Shape[i] <= 1 {
			continue
		}
		s := t.Stride[i] * size
		if footprint(t, s) > s {
			return false
		}
		for j := range i {
			if t.Shape[j] > 1 && t.Stride[j] == t.Stride[i] {
				return false
			}
		}
	}
	return true
}

// disjoint reports that no byte belongs to both. Views that interleave, as q, k and v of one buffer
// do, are told apart where both step by one stride and stay beside each other within it.
func disjoint(a, b *tensor.Tensor) bool {
	x, y := int64(uintptr(a.Data)), int64(uintptr(b.Data))
	if x+footprint(a, noLimit) <= y || y+footprint(b, noLimit) <= x {
		return true
	}
	for i := range int(a.NDim) {
		s := a.Stride[i] * a.DType.Size()
		if a.Shape[i] > 1 && s > 0 && multiples(a, s) && multiples(b, s) && apart(x%s, footprint(a, s), y%s, footprint(b, s), s) {
			return true
		}
	}
	return false
}

// multiples reports that axes that step by s or more step by multiples of it.
func multiples(t *tensor.Tensor, s int64) bool {
	for i := range int(t.NDim) {
		if step := t.Stride[i] * t.DType.Size(); t.Shape[i] > 1 && step >= s && step%s != 0 {
			return false
		}
	}
	return true
}

// apart reports that [x, x+n) and [y, y+m) do not meet on a circle of s bytes.
func apart(x, n, y, m, s int64) bool {
	if n > s || m > s {
		return false
	}
	return (y-x+s)%s >= n && (x-y+s)%s >= m
}
