package main

import (
	"unsafe"

	"ulysses/cuda"
	"ulysses/tensor"
)

// dtypes maps the header's element types: DLPack's type code | bits << 8.
var dtypes = map[uint16]tensor.DType{
	typeF32: tensor.F32, typeBF16: tensor.BF16, typeF16: tensor.F16, typeI32: tensor.I32, typeI64: tensor.I64,
	typeU8: tensor.U8,
}

// maxElements is the largest number of elements of a tensor, and of elements between its first and
// its last. Sizes in bytes then cannot overflow.
const maxElements = int64(1) << 48

// tensorIn checks a tensor of the caller and returns it as a view of the caller's memory. axes is
// the number of axes; a tensor with one axis less gets a first axis, the batch, of extent 1. axes 0
// = any number.
func (c *context) tensorIn(op, name string, p *cTensor, axes int) (t tensor.Tensor, err error) {
	if p == nil {
		return t, invalid("%s: %s is NULL", op, name)
	}
	if p.device == onCUDA && c.deviceType == onCPU {
		return t, invalid(
			"%s: %s is on a GPU (DLPack device 2) and this context on the CPU; create the context with ULYSSES_CUDA%s",
			op, name, noPlugin())
	}
	if p.device != c.deviceType {
		return t, invalid(
			"%s: %s is on device %d and this context on device %d (in DLPack, 1 is the CPU, 2 is CUDA); copy the tensor, or create another context",
			op, name, p.device, c.deviceType)
	}
	if c.deviceType != onCPU && p.ordinal != c.ordinal {
		return t, invalid("%s: %s is on GPU %d and this context on GPU %d; copy the tensor, or create another context",
			op, name, p.ordinal, c.ordinal)
	}
	dtype, ok := dtypes[uint16(p.code)|uint16(p.bits)<<8]
	if !ok || p.lanes != 1 {
		return t, invalid(
			"%s: %s has DLPack type code %d, %d bits and %d lanes; use one of ULYSSES_F32, BF16, F16, I32, I64, U8", op,
			name, p.code, p.bits, p.lanes)
	}
	n := int(p.ndim)
	lead := 0
	if axes > 0 && n == axes-1 {
		lead = 1
	}
	if n < 0 || n+lead > tensor.MaxDims || (axes > 0 && n+lead != axes) {
		return t, invalid("%s: %s has %d axes; give %s", op, name, n, axesText(axes))
	}
	if n > 0 && p.shape == nil {
		return t, invalid("%s: %s has %d axes and its shape is NULL; set the shape", op, name, n)
	}
	t = tensor.Tensor{DType: dtype, NDim: int8(n + lead)}
	if c.deviceType != onCPU {
		t.Where = tensor.CUDA
	}
	if err := extents(op, name, p, &t, n, lead); err != nil {
		return t, err
	}
	if t.Numel() == 0 || c.shapesOnly {
		return t, nil
	}
	if p.data == nil {
		return t, invalid("%s: %s is %v and its data is NULL; set data", op, name, t)
	}
	if p.byte_offset > 1<<50 {
		return t, invalid("%s: %s has byte_offset %d; give at most 2^50", op, name, p.byte_offset)
	}
	t.Data = unsafe.Add(p.data, p.byte_offset)
	if uintptr(t.Data)%uintptr(dtype.Size()) != 0 {
		return t, invalid("%s: %s is at address %#x; %v needs a multiple of %d", op, name, uintptr(t.Data), dtype,
			dtype.Size())
	}
	return t, c.checkAddress(op, name, t.Data)
}

// noPlugin returns the end of a message that recommends a context on a GPU: how to get the CUDA
// plug-in, or "" if there is one.
func noPlugin() string {
	if cuda.Find() != "" {
		return ""
	}
	return "; it needs the CUDA plug-in, which is not in the folder of this library: " + cuda.InstallHint
}

// axesText describes the numbers of axes that tensorIn accepts.
func axesText(axes int) string {
	texts := [...]string{"at most 8", "1", "2", "3, or 2 for one sequence", "4, or 3 for one sequence"}
	if axes < len(texts) {
		return texts[axes]
	}
	return "as many as the header says"
}

// extents reads n extents and strides into t, after `lead` axes of extent 1 (0 or 1).
func extents(op, name string, p *cTensor, t *tensor.Tensor, n, lead int) error {
	numel, reach, empty := int64(1), int64(1), false
	for i := range n {
		d := element(p.shape, i)
		if d < 0 || d > maxElements || (d > 0 && numel > maxElements/d) {
			return invalid("%s: %s: axis %d has extent %d; extents are 0 or more, and their product is below 2^48", op,
				name, i, d)
		}
		t.Shape[i+lead] = d
		numel *= max(d, 1)
		empty = empty || d == 0
	}
	step := int64(1)
	for i := n - 1; i >= 0; i-- {
		d := t.Shape[i+lead]
		stride := step
		// array libraries set any strides for a tensor without elements
		if p.strides != nil && !empty {
			stride = element(p.strides, i)
		}
		t.Stride[i+lead] = stride
		step *= max(d, 1)
		if d <= 1 {
			continue
		}
		if stride == 0 {
			return invalid(
				"%s: %s: axis %d has stride 0 over extent %d, so it is an expanded tensor, such as a gradient of sum(); copy it first",
				op, name, i, d)
		}
		if stride < 0 || stride > maxElements/d {
			return invalid(
				"%s: %s: axis %d has stride %d over extent %d; strides must be positive and reach below 2^48: copy the tensor first",
				op, name, i, stride, d)
		}
		reach += (d - 1) * stride
	}
	if reach > maxElements {
		return invalid("%s: %s: its strides span %d elements; at most 2^48 are possible", op, name, reach)
	}
	if lead == 1 {
		t.Shape[0], t.Stride[0] = 1, reach
	}
	return nil
}

// rawMemory returns memory of the caller as a tensor of bytes. It is nil if p is NULL or has 0
// bytes.
func (c *context) rawMemory(op, name string, p unsafe.Pointer, bytes uint64) (t tensor.Tensor, err error) {
	if p == nil || bytes == 0 {
		if p == nil && bytes > 0 {
			return t, invalid("%s: %s is NULL and %s_bytes is %d; give memory, or 0 bytes", op, name, name, bytes)
		}
		return t, nil
	}
	if bytes > uint64(maxElements) {
		return t, invalid("%s: %s_bytes is %d; give at most 2^48", op, name, bytes)
	}
	if align := uintptr(c.dev.Info().Align); uintptr(p)%align != 0 {
		return t, invalid("%s: %s is at address %#x; align it to %d bytes", op, name, uintptr(p), align)
	}
	return c.byteTensor(p, int64(bytes)), c.checkAddress(op, name, p)
}
