package main

import (
	"unsafe"

	"ulysses/cuda"
	"ulysses/tensor"
)

// dtypes maps the header's types, which are DLPack's code | bits << 8.
var dtypes = map[uint16]tensor.DType{
	typeF32: tensor.F32, typeBF16: tensor.BF16, typeF16: tensor.F16, typeI32: tensor.I32, typeI64: tensor.I64, typeU8: tensor.U8,
}

// maxElements bounds a tensor's extents and reach, so that sizes in bytes stay far from
// overflowing.
const maxElements = int64(1) << 48

// tensorIn is a caller's tensor as a view. axes is the number it shall have; one less means that
// the first, the batch, is 1. 0 = as it is.
func (c *context) tensorIn(op, name string, p *cTensor, axes int) (t tensor.Tensor, err error) {
	if p == nil {
		return t, invalid("%s: %s is NULL", op, name)
	}
	if p.device == onCUDA && c.place == onCPU {
		return t, invalid("%s: %s lies on a GPU (DLPack device 2): this context works on the CPU: make one with ULYSSES_CUDA%s", op, name, noPlugin())
	}
	if p.device != c.place {
		return t, invalid("%s: %s lies on device %d: this context works on device %d (DLPack: 1 the CPU, 2 CUDA)", op, name, p.device, c.place)
	}
	if c.place != onCPU && p.ordinal != c.ordinal {
		return t, invalid("%s: %s lies on GPU %d: this context works on %d", op, name, p.ordinal, c.ordinal)
	}
	dtype, ok := dtypes[uint16(p.code)|uint16(p.bits)<<8]
	if !ok || p.lanes != 1 {
		return t, invalid("%s: %s has DLPack type code %d, %d bits, %d lanes: use one of ULYSSES_F32, BF16, F16, I32, I64, U8", op, name, p.code, p.bits, p.lanes)
	}
	n := int(p.ndim)
	lead := 0
	if axes > 0 && n == axes-1 {
		lead = 1
	}
	if n < 0 || n+lead > tensor.MaxDims || (axes > 0 && n+lead != axes) {
		return t, invalid("%s: %s has %d axes: it must have %s", op, name, n, axesText(axes))
	}
	if n > 0 && p.shape == nil {
		return t, invalid("%s: %s has %d axes and its shape is NULL", op, name, n)
	}
	t = tensor.Tensor{DType: dtype, NDim: int8(n + lead)}
	if c.place != onCPU {
		t.Where = tensor.CUDA
	}
	if err := extents(op, name, p, &t, n, lead); err != nil {
		return t, err
	}
	if t.Numel() == 0 {
		return t, nil
	}
	if c.shapesOnly {
		return t, nil
	}
	if p.data == nil {
		return t, invalid("%s: %s is %v and its data is NULL", op, name, t)
	}
	if p.byte_offset > 1<<50 {
		return t, invalid("%s: %s has byte_offset %d", op, name, p.byte_offset)
	}
	t.Data = unsafe.Add(p.data, p.byte_offset)
	if uintptr(t.Data)%uintptr(dtype.Size()) != 0 {
		return t, invalid("%s: %s lies at %#x: %v needs an address that is a multiple of %d", op, name, uintptr(t.Data), dtype, dtype.Size())
	}
	return t, c.reach(op, name, t.Data)
}

// noPlugin is what a context on a GPU would want first; "" where it is there.
func noPlugin() string {
	if cuda.Find() != "" {
		return ""
	}
	return "; that needs the CUDA plug-in, and none lies beside this library: " + cuda.InstallHint
}

func axesText(axes int) string {
	texts := [...]string{"8 at most", "1", "2", "3, or 2 for one sequence", "4, or 3 for one sequence"}
	if axes < len(texts) {
		return texts[axes]
	}
	return "as many as the header says"
}

// extents reads shape and strides behind lead axes of extent 1.
func extents(op, name string, p *cTensor, t *tensor.Tensor, n, lead int) error {
	numel, reach, empty := int64(1), int64(1), false
	for i := range n {
		d := at(p.shape, i)
		if d < 0 || d > maxElements || (d > 0 && numel > maxElements/d) {
			return invalid("%s: %s: axis %d has extent %d: it must be 0 or more, and all together below 2^48", op, name, i, d)
		}
		t.Shape[i+lead] = d
		numel *= max(d, 1)
		empty = empty || d == 0
	}
	step := int64(1)
	for i := n - 1; i >= 0; i-- {
		d := t.Shape[i+lead]
		stride := step
		// strides of a tensor without elements are unused: array libraries set them to any value
		if p.strides != nil && !empty {
			stride = at(p.strides, i)
		}
		t.Stride[i+lead] = stride
		step *= max(d, 1)
		if d <= 1 {
			continue
		}
		if stride == 0 {
			return invalid("%s: %s: axis %d has stride 0 over extent %d, one element seen many times (an expanded tensor, such as a gradient of sum()): copy it first", op, name, i, d)
		}
		if stride < 0 || stride > maxElements/d {
			return invalid("%s: %s: axis %d has stride %d over extent %d: strides are positive here, and reach below 2^48: copy it first", op, name, i, stride, d)
		}
		reach += (d - 1) * stride
	}
	if reach > maxElements {
		return invalid("%s: %s: its strides reach over %d elements: 2^48 are the most", op, name, reach)
	}
	if lead == 1 {
		t.Shape[0], t.Stride[0] = 1, reach
	}
	return nil
}

// block is memory of the caller's as plain bytes.
func (c *context) block(op, name string, p unsafe.Pointer, bytes uint64) (t tensor.Tensor, err error) {
	if p == nil || bytes == 0 {
		if p == nil && bytes > 0 {
			return t, invalid("%s: %s is NULL and %s_bytes is %d", op, name, name, bytes)
		}
		return t, nil
	}
	if bytes > uint64(maxElements) {
		return t, invalid("%s: %s_bytes is %d: below 2^48 is possible", op, name, bytes)
	}
	if align := uintptr(c.dev.Info().Align); uintptr(p)%align != 0 {
		return t, invalid("%s: %s lies at %#x: align it to %d bytes", op, name, uintptr(p), align)
	}
	return c.bytes(p, int64(bytes)), c.reach(op, name, p)
}
