package main

import (
	"math/rand/v2"
	"unsafe"
)

// generator makes descriptors that are valid except for a few values. Descriptors with many invalid
// values would be refused by the first check.
type generator struct {
	*rand.Rand
	faults int    // invalid values that are still to be made
	arena  []byte // memory of all tensors
	slots  int64  // slots of the arena in use
	loose  bool   // tensors need not be dense
}

func (d *generator) byte() byte { return byte(d.Uint32()) }

// oneIn returns true with probability 1/n.
func (d *generator) oneIn(n int) bool { return d.IntN(n) == 0 }

// wrong reports whether the next value should be invalid.
func (d *generator) wrong() bool {
	if d.faults == 0 || !d.oneIn(30) {
		return false
	}
	d.faults--
	return true
}

// number returns the valid value, or sometimes another.
func (d *generator) number(valid int64) int64 {
	if !d.wrong() {
		return valid
	}
	switch d.IntN(8) {
	case 0:
		return 0
	case 1:
		return valid + 1
	case 2:
		return valid - 1
	case 3:
		return -valid
	case 4:
		return d.Int64N(32)
	case 5:
		return int64(1) << d.IntN(63)
	case 6:
		return -int64(1) << d.IntN(64)
	}
	return int64(d.Uint64())
}

// bounded is number, for values that determine memory or time: the result is at most limit, or far
// beyond what any machine has.
func (d *generator) bounded(valid, limit int64) int64 {
	if n := d.number(valid); n <= limit || n > 1<<44 {
		return n
	}
	return limit
}

// corrupt sometimes overwrites a few bytes of a struct, in the range [from, to).
func (d *generator) corrupt(p unsafe.Pointer, from, to uintptr) {
	if d.wrong() {
		for range 1 + d.IntN(3) {
			unsafe.Slice((*byte)(p), to)[from+uintptr(d.IntN(int(to-from)))] = d.byte()
		}
	}
}

// address returns an address in the arena, followed by at least this many bytes.
func (d *generator) address(bytes int64) unsafe.Pointer {
	const slot = 1 << 20
	at := d.slots * slot // no tensor shares a slot, unless the address is made invalid
	d.slots++
	if d.wrong() {
		at = int64(d.byte()%64)*slot + int64(d.byte())
	}
	if bytes > int64(len(d.arena))-at {
		at = 0
	}
	return unsafe.Pointer(&d.arena[at])
}

// fuzzTensor is a tensor with the memory of its shape and strides.
type fuzzTensor struct {
	t              cTensor
	shape, strides [12]int64
}

// tensor returns a tensor of a shape, with a few invalid values. Its memory is as large as its
// fields state; if that is impossible, its data is NULL.
func (d *generator) tensor(shape ...int64) *cTensor {
	if d.wrong() {
		return nil
	}
	x := &fuzzTensor{t: cTensor{device: onCPU, code: 2, bits: 32, lanes: 1, ndim: int32(d.number(int64(len(shape)))),
		byte_offset: uint64(d.number(d.Int64N(3) * 4))}}
	x.t.shape, x.t.strides = &x.shape[0], &x.strides[0]
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		x.shape[i], x.strides[i] = d.number(shape[i]), d.number(step)
		if step *= max(shape[i], 1); d.loose && d.oneIn(4) {
			step += int64(d.IntN(3))
		}
	}
	if !d.loose && d.oneIn(4) || d.wrong() {
		x.t.strides = nil
	}
	d.corrupt(p(&x.t), unsafe.Offsetof(x.t.device), unsafe.Offsetof(x.t.ndim))
	d.corrupt(p(&x.t), unsafe.Offsetof(x.t.code), unsafe.Offsetof(x.t.shape))
	if d.wrong() {
		x.t.shape = nil
	}
	reach := reach(x)
	x.t.data = d.address(reach)
	if reach > int64(len(d.arena)) || d.wrong() {
		x.t.data = nil
	}
	return &x.t
}

// reach returns the bytes after data that a tensor states to have, at most 2^60.
func reach(x *fuzzTensor) int64 {
	n, step := float64(8), 1.0
	for i := min(len(x.shape), max(0, int(x.t.ndim))) - 1; i >= 0; i-- {
		s := step
		if x.t.strides != nil {
			s = float64(x.strides[i])
		}
		n += max(0, float64(x.shape[i])) * max(0, s) * 8
		step *= max(1, float64(x.shape[i]))
	}
	return int64(min(n+float64(x.t.byte_offset), 1<<60))
}

// memory returns memory for saved or workspace: need bytes, with a few invalid values.
func (d *generator) memory(need uint64) (unsafe.Pointer, uint64) {
	if need == 0 && d.oneIn(2) || d.wrong() {
		return nil, uint64(d.number(0))
	}
	bytes := uint64(d.number(int64(need)))
	if bytes > uint64(len(d.arena)) && bytes < 1<<48 {
		bytes = need
	}
	return d.address(int64(need)), bytes
}
