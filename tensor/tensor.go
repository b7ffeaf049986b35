package tensor

import (
	"fmt"
	"strings"
	"unsafe"
)

// MaxDims is the largest number of axes of a Tensor.
const MaxDims = 8

// Place is the memory that Data points to.
type Place uint8

const (
	Host Place = iota
	CUDA
)

// Tensor is a view of memory. It does not own the memory, which must stay valid while the view is
// used. Strides are in elements. The zero value is an absent optional tensor.
type Tensor struct {
	Data   unsafe.Pointer
	DType  DType
	Where  Place
	NDim   int8
	Shape  [MaxDims]int64
	Stride [MaxDims]int64
}

// Of returns a tensor of the given shape over dense row-major memory at data. Without data, it has
// only a type and a shape.
func Of(data unsafe.Pointer, dtype DType, shape ...int64) Tensor {
	t := Tensor{Data: data, DType: dtype, NDim: int8(len(shape))}
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		t.Shape[i], t.Stride[i] = shape[i], step
		step *= shape[i]
	}
	return t
}

// OfFloat32 returns a tensor over a Go slice, for tests and for small host tensors. The slice must
// stay alive while the tensor is used.
func OfFloat32(x []float32, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), F32, shape...)
}

// OfInt32 is OfFloat32 for I32.
func OfInt32(x []int32, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), I32, shape...)
}

// OfInt64 is OfFloat32 for I64.
func OfInt64(x []int64, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), I64, shape...)
}

// OfFloat64 is OfFloat32 for F64.
func OfFloat64(x []float64, shape ...int64) Tensor {
	return Of(unsafe.Pointer(unsafe.SliceData(x)), F64, shape...)
}

// IsNil reports whether t is an absent optional tensor.
func (t Tensor) IsNil() bool { return t.DType == Invalid }

// Dims returns the shape as a new slice.
func (t Tensor) Dims() []int64 { return append([]int64(nil), t.Shape[:t.NDim]...) }

// Dim returns the extent of axis i. A negative i counts from the end.
func (t Tensor) Dim(i int) int64 {
	if i < 0 {
		i += int(t.NDim)
	}
	return t.Shape[i]
}

// Numel returns the number of elements.
func (t Tensor) Numel() int64 {
	n := int64(1)
	for _, d := range t.Shape[:t.NDim] {
		n *= d
	}
	return n
}

// Bytes returns the bytes of the elements of a dense tensor.
func (t Tensor) Bytes() int64 { return t.Numel() * t.DType.Size() }

// Contiguous reports whether the elements are dense in row-major order. Axes of extent 1 may have
// any stride.
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

// Offset returns a view that begins n elements later. A tensor without data stays without data.
func (t Tensor) Offset(n int64) Tensor {
	if t.Data != nil {
		t.Data = unsafe.Add(t.Data, n*t.DType.Size())
	}
	return t
}

// Slice returns a view of the indices [lo, hi) of an axis. A view without elements begins where t
// begins: Go code must not keep a pointer behind the end of an allocation.
func (t Tensor) Slice(axis int, lo, hi int64) Tensor {
	if lo < 0 || hi < lo || hi > t.Shape[axis] {
		panic(fmt.Sprintf("tensor.Slice: [%d, %d) of axis %d of %v", lo, hi, axis, t))
	}
	t.Shape[axis] = hi - lo
	if t.Numel() > 0 {
		t = t.Offset(lo * t.Stride[axis])
	}
	return t
}

// Select returns a view of index i of an axis, without the axis.
func (t Tensor) Select(axis int, i int64) Tensor {
	t = t.Slice(axis, i, i+1)
	copy(t.Shape[axis:], t.Shape[axis+1:t.NDim])
	copy(t.Stride[axis:], t.Stride[axis+1:t.NDim])
	t.NDim--
	t.Shape[t.NDim], t.Stride[t.NDim] = 0, 0
	return t
}

// Permute returns a view with the axes reordered: axis i of the result is axis order[i] of t.
func (t Tensor) Permute(order ...int) Tensor {
	r := t
	for i, a := range order {
		r.Shape[i], r.Stride[i] = t.Shape[a], t.Stride[a]
	}
	return r
}

// View returns a view of a contiguous tensor in another shape with the same number of elements.
func (t Tensor) View(shape ...int64) Tensor {
	r := Of(t.Data, t.DType, shape...)
	r.Where = t.Where
	if !t.Contiguous() || r.Numel() != t.Numel() {
		// The message has r, not shape: so shape stays on the stack, and View allocates nothing.
		panic(fmt.Sprintf("tensor.View: %v as %v", t, r))
	}
	return r
}

// Flatten returns a view with the axes first to last merged into one. Their strides must be those
// of a split axis.
func (t Tensor) Flatten(first, last int) Tensor {
	r := t
	r.NDim -= int8(last - first)
	stride, n := t.Stride[last], t.Shape[last]
	for i := last - 1; i >= first; i-- {
		if t.Shape[i] != 1 && n != 0 && t.Stride[i] != stride*n {
			if n != 1 {
				panic(fmt.Sprintf("tensor.Flatten: axes %d..%d of %v cannot be merged", first, last, t))
			}
			stride = t.Stride[i]
		}
		n *= t.Shape[i]
	}
	r.Shape[first], r.Stride[first] = n, stride
	copy(r.Shape[first+1:], t.Shape[last+1:t.NDim])
	copy(r.Stride[first+1:], t.Stride[last+1:t.NDim])
	for i := r.NDim; i < t.NDim; i++ {
		r.Shape[i], r.Stride[i] = 0, 0 // as in Of, so that equal shapes compare equal
	}
	return r
}

// Split returns a view with an axis split into two, of the extents outer and shape/outer.
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

// Float32s returns the memory of a dense F32 tensor in host memory.
func (t Tensor) Float32s() []float32 { return slice[float32](t, F32) }

// Int32s is Float32s for I32.
func (t Tensor) Int32s() []int32 { return slice[int32](t, I32) }

// Int64s is Float32s for I64.
func (t Tensor) Int64s() []int64 { return slice[int64](t, I64) }

// Float64s is Float32s for F64.
func (t Tensor) Float64s() []float64 { return slice[float64](t, F64) }

// RawBytes returns the memory of a dense tensor of any type in host memory.
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

// String returns the type and the shape, "F32[4, 8]", and the strides unless t is contiguous.
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

// At returns a dense tensor of another type and shape over the memory of t, which is U8, from a
// byte offset on. Arenas and communication buffers are divided in this way.
func (t Tensor) At(offset int64, dtype DType, shape ...int64) Tensor {
	r := Of(nil, dtype, shape...)
	if t.DType != U8 || offset < 0 || offset+r.Bytes() > t.Numel() {
		panic(fmt.Sprintf("tensor.At: %v at byte %d of %v", r, offset, t))
	}
	if r.Where = t.Where; t.Data != nil { // a tensor without data has no address
		r.Data = unsafe.Add(t.Data, offset)
	}
	return r
}
