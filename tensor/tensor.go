package tensor

import (
	"fmt"
	"strings"
	"unsafe"
)

// MaxDims is the largest number of axes a Tensor has.
const MaxDims = 8

// Place says which memory Data points into.
type Place uint8

const (
	Host Place = iota
	CUDA
)

// Tensor is a view of memory owned by someone else: copied freely. Strides are in elements, int64
// everywhere.
type Tensor struct {
	Data   unsafe.Pointer
	DType  DType
	Where  Place
	NDim   int8
	Shape  [MaxDims]int64
	Stride [MaxDims]int64
}

// Of views row-major memory at data as a tensor of the given shape.
func Of(data unsafe.Pointer, dtype DType, shape ...int64) Tensor {
	t := Tensor{Data: data, DType: dtype, NDim: int8(len(shape))}
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		t.Shape[i], t.Stride[i] = shape[i], step
		step *= shape[i]
	}
	return t
}

// OfFloat32 views a Go slice as a tensor. For tests and host-side staging: the slice must outlive
// the view.
func OfFloat32(x []float32, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), F32, shape...)
}

// OfInt32 views a Go slice as a tensor; see OfFloat32.
func OfInt32(x []int32, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), I32, shape...)
}

// OfInt64 views a Go slice as a tensor; see OfFloat32.
func OfInt64(x []int64, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), I64, shape...)
}

// OfFloat64 views a Go slice as a tensor; see OfFloat32.
func OfFloat64(x []float64, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), F64, shape...)
}

// IsNil reports an absent optional tensor.
func (t Tensor) IsNil() bool { return t.DType == Invalid }

// Dims is the shape as a slice of its own.
func (t Tensor) Dims() []int64 { return append([]int64(nil), t.Shape[:t.NDim]...) }

// Dim is the extent of axis i; a negative i counts from the end.
func (t Tensor) Dim(i int) int64 {
	if i < 0 {
		i += int(t.NDim)
	}
	return t.Shape[i]
}

// Numel is the number of elements.
func (t Tensor) Numel() int64 {
	n := int64(1)
	for _, d := range t.Shape[:t.NDim] {
		n *= d
	}
	return n
}

// Bytes is the size of the elements when dense.
func (t Tensor) Bytes() int64 { return t.Numel() * t.DType.Size() }

// Contiguous reports row-major order without gaps; axes of extent 1 may have any stride.
func (t Tensor) Contiguous() bool {
	step := int64(1)
	for i := int(t.NDim) - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Stride[i] != step {
			return t.Numel() == 0
		}
		step *= t.Shape[i]
	}
	return true
}

// Offset moves the view by n elements. A tensor without memory, of a plan, stays without.
func (t Tensor) Offset(n int64) Tensor {
	if t.Data != nil {
		t.Data = unsafe.Add(t.Data, n*t.DType.Size())
	}
	return t
}

// Slice keeps [lo, hi) of an axis.
func (t Tensor) Slice(axis int, lo, hi int64) Tensor {
	if lo < 0 || hi < lo || hi > t.Shape[axis] {
		panic(fmt.Sprintf("tensor.Slice: [%d, %d) of axis %d of %v", lo, hi, axis, t))
	}
	if hi > lo {
		t = t.Offset(lo * t.Stride[axis])
	}
	t.Shape[axis] = hi - lo
	return t
}

// Select keeps index i of an axis and drops the axis.
func (t Tensor) Select(axis int, i int64) Tensor {
	t = t.Slice(axis, i, i+1)
	copy(t.Shape[axis:], t.Shape[axis+1:t.NDim])
	copy(t.Stride[axis:], t.Stride[axis+1:t.NDim])
	t.NDim--
	t.Shape[t.NDim], t.Stride[t.NDim] = 0, 0
	return t
}

// Permute reorders the axes: axis i of the result is axis order[i] of t.
func (t Tensor) Permute(order ...int) Tensor {
	r := t
	for i, a := range order {
		r.Shape[i], r.Stride[i] = t.Shape[a], t.Stride[a]
	}
	return r
}

// View gives contiguous memory another shape of as many elements.
func (t Tensor) View(shape ...int64) Tensor {
	r := Of(t.Data, t.DType, shape...)
	r.Where = t.Where
	if !t.Contiguous() || r.Numel() != t.Numel() {
		// not shape, which then stays on the stack: calls that view allocate nothing
		panic(fmt.Sprintf("tensor.View: %v as %v", t, r))
	}
	return r
}

// Flatten merges axes [first, last] into one; they must lie as if one (the layout of a split axis).
func (t Tensor) Flatten(first, last int) Tensor {
	r := t
	r.NDim -= int8(last - first)
	stride, n := t.Stride[last], t.Shape[last]
	for i := last - 1; i >= first; i-- {
		if t.Shape[i] != 1 && n != 0 && t.Stride[i] != stride*n {
			if n != 1 {
				panic(fmt.Sprintf("tensor.Flatten: axes %d..%d of %v are not one", first, last, t))
			}
			stride = t.Stride[i]
		}
		n *= t.Shape[i]
	}
	r.Shape[first], r.Stride[first] = n, stride
	copy(r.Shape[first+1:], t.Shape[last+1:t.NDim])
	copy(r.Stride[first+1:], t.Stride[last+1:t.NDim])
	for i := r.NDim; i < t.NDim; i++ {
		r.Shape[i], r.Stride[i] = 0, 0 // as Of leaves them, so that equal shapes compare equal
	}
	return r
}

// Split makes axis into two of extents outer and shape/outer.
func (t Tensor) Split(axis int, outer int64) Tensor {
	if outer == 0 || t.Shape[axis]%outer != 0 {
		panic(fmt.Sprintf("tensor.Split: axis %d of %v by %d", axis, t, outer))
	}
	r := t
	r.NDim++
	copy(r.Shape[axis+2:], t.Shape[axis+1:t.NDim])
	copy(r.Stride[axis+2:], t.Stride[axis+1:t.NDim])
	inner := t.Shape[axis] / outer
	r.Shape[axis], r.Stride[axis] = outer, t.Stride[axis]*inner
	r.Shape[axis+1], r.Stride[axis+1] = inner, t.Stride[axis]
	return r
}

// Float32s is the memory of a dense host F32 tensor.
func (t Tensor) Float32s() []float32 { return slice[float32](t, F32) }

// Int32s is the memory of a dense host I32 tensor.
func (t Tensor) Int32s() []int32 { return slice[int32](t, I32) }

// Int64s is the memory of a dense host I64 tensor.
func (t Tensor) Int64s() []int64 { return slice[int64](t, I64) }

// Float64s is the memory of a dense host F64 tensor.
func (t Tensor) Float64s() []float64 { return slice[float64](t, F64) }

// RawBytes is the memory of a dense host tensor of any type.
func (t Tensor) RawBytes() []byte { return unsafe.Slice((*byte)(t.Data), t.dense().Bytes()) }

func slice[T any](t Tensor, d DType) []T {
	if t.DType != d {
		panic(fmt.Sprintf("tensor: %v is not %v", t, d))
	}
	return unsafe.Slice((*T)(t.Data), t.dense().Numel())
}

func (t Tensor) dense() Tensor {
	if t.Where != Host || !t.Contiguous() {
		panic(fmt.Sprintf("tensor: %v is not dense host memory", t))
	}
	return t
}

// String is the type and shape, with strides unless row-major: "F32[4, 8]".
func (t Tensor) String() string {
	if t.IsNil() {
		return "nil"
	}
	s := t.DType.String() + list(t.Shape[:t.NDim])
	if !t.Contiguous() {
		s += " strides " + list(t.Stride[:t.NDim])
	}
	return s
}

func list(x []int64) string { return strings.ReplaceAll(fmt.Sprint(x), " ", ", ") }

// At views the bytes from offset on as a dense tensor of another type: how arenas and wire buffers
// are carved.
func (t Tensor) At(offset int64, dtype DType, shape ...int64) Tensor {
	r := Of(nil, dtype, shape...)
	if t.DType != U8 || offset < 0 || offset+r.Bytes() > t.Numel() {
		panic(fmt.Sprintf("tensor.At: %v at byte %d of %v", r, offset, t))
	}
	if r.Where = t.Where; t.Data != nil { // without memory, of a plan, there is no address
		r.Data = unsafe.Add(t.Data, offset)
	}
	return r
}
