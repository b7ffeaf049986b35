package main

import "ulysses/tensor"

// operand is a tensor or memory of the current call.
type operand struct {
	name string
	t    tensor.Tensor
	out  bool // the call writes it
}

// addOperand records an operand for checkOverlaps.
func (c *context) addOperand(name string, t tensor.Tensor, out bool) {
	if !t.IsNil() && t.Numel() > 0 {
		c.operands = append(c.operands, operand{name, t, out})
	}
}

// checkOverlaps refuses outputs that overlap another operand, and outputs with strides that place
// two elements at one address.
func (c *context) checkOverlaps(op string) error {
	for i := range c.operands {
		a := &c.operands[i]
		if !a.out {
			continue
		}
		if !injective(&a.t) {
			return invalid(
				"%s: %s is %v; its strides place several elements at one address: give a tensor without overlaps", op,
				a.name, a.t)
		}
		for j := range c.operands {
			if b := &c.operands[j]; i != j && (i < j || !b.out) && !disjoint(&a.t, &b.t) {
				return invalid("%s: %s, which the call writes, and %s overlap in memory; give each its own memory", op,
					a.name, b.name)
			}
		}
	}
	return nil
}

// footprint returns the bytes from the first element to the end of the last. Axes with a stride of
// limit bytes or more count as one element.
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

// injective reports whether the stride of each axis is at least the footprint of the axes with
// smaller strides. Then no two elements have the same address.
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

// disjoint reports whether a and b have no byte in common. Views that interleave, such as q, k and
// v of one buffer, are recognized as disjoint if both have the same stride s and occupy different
// bytes of each period of s bytes. It may return false for other disjoint views.
func disjoint(a, b *tensor.Tensor) bool {
	x, y := int64(uintptr(a.Data)), int64(uintptr(b.Data))
	if x+footprint(a, noLimit) <= y || y+footprint(b, noLimit) <= x {
		return true
	}
	for i := range int(a.NDim) {
		s := a.Stride[i] * a.DType.Size()
		if a.Shape[i] > 1 && s > 0 && multiples(a, s) && multiples(b, s) &&
			apartModulo(x%s, footprint(a, s), y%s, footprint(b, s), s) {
			return true
		}
	}
	return false
}

// multiples reports whether all strides of s bytes or more are multiples of s.
func multiples(t *tensor.Tensor, s int64) bool {
	for i := range int(t.NDim) {
		if step := t.Stride[i] * t.DType.Size(); t.Shape[i] > 1 && step >= s && step%s != 0 {
			return false
		}
	}
	return true
}

// apartModulo reports whether [x, x+n) and [y, y+m) have no byte in common modulo s.
func apartModulo(x, n, y, m, s int64) bool {
	if n > s || m > s {
		return false
	}
	return (y-x+s)%s >= n && (x-y+s)%s >= m
}
