package conformance

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// sentinel fills all memory that has no given value. As F32 it is a NaN, which makes unwritten
// results and reads outside an array visible. As I32 it is out of every range.
const sentinel = 0x7fc0beef

// layout is the order of axes and the strides of an array.
type layout struct {
	order []int // axes from the outermost to the innermost; nil = 0, 1, ...
	gap   int64 // elements between the indices of every axis but the innermost
	inner int64 // stride of the innermost axis; 0 = 1
	shift int64 // elements from an aligned address to the first
	// the outermost axis has a stride of more than 2³¹ elements, in address space without memory
	far bool
	// strides of all axes but the innermost are rounded up to multiples of it; 0 = 1
	multiple int64
}

var (
	dense     = layout{}
	shifted   = layout{shift: 3}
	padded    = layout{gap: 5, shift: 1}
	headMajor = layout{order: []int{1, 0, 2}, gap: 3, shift: 2} // [T, H, D] as [H, T, D]
	far       = layout{gap: 2, far: true}
	farHeads  = layout{order: []int{1, 0, 2}, far: true}
)

// array is a tensor surrounded by sentinels.
type array struct {
	tensor.Tensor
	name    string
	buffer  device.Buffer
	host    []byte // copy of the whole buffer; on the CPU the buffer itself
	before  []byte // the buffer before the operation
	base    int64  // offset of element 0 in bytes
	written bool
}

// in allocates an array with values that operations must not change.
func (b *bench) in(name string, d tensor.DType, l layout, values []float64, shape ...int64) *array {
	return b.allocate(name, d, l, values, shape)
}

// out allocates a result, filled with sentinels.
func (b *bench) out(name string, d tensor.DType, l layout, shape ...int64) *array {
	a := b.allocate(name, d, l, nil, shape)
	a.written = true
	return a
}

// inout allocates a result with initial values.
func (b *bench) inout(name string, d tensor.DType, l layout, values []float64, shape ...int64) *array {
	a := b.allocate(name, d, l, values, shape)
	a.written = true
	return a
}

func (b *bench) allocate(name string, d tensor.DType, l layout, values []float64, shape []int64) *array {
	b.t.Helper()
	if b.aligned {
		l = l.aligned()
	}
	t, last := l.tensor(d, shape)
	guard := max(b.dev.Info().Align, 64)
	if b.bare {
		guard = 0
	}
	base := guard + l.shift*d.Size()
	alloc := b.dev.Alloc
	if l.far {
		alloc = reserve
	}
	bytes := base + (last+1)*d.Size()
	if !b.bare {
		bytes = (bytes + guard + 3) / 4 * 4
	} else if t.Numel() == 0 { // operations may check the alignment
		bytes = b.dev.Info().Align
	}
	buffer, err := alloc(bytes)
	if err != nil {
		b.t.Fatalf("%s: %v", name, err)
	}
	view := b.tensor(buffer.Pointer(), tensor.U8, buffer.Bytes())
	t.Data, t.Where = unsafe.Add(buffer.Pointer(), base), view.Where
	a := &array{Tensor: t, name: name, buffer: buffer, base: base}
	b.arrays = append(b.arrays, a)
	if view.Where == tensor.Host || l.far {
		a.pull(b)
	} else {
		a.host = make([]byte, buffer.Bytes())
	}
	a.fill(b.t, l, values)
	if !l.far {
		a.before = append([]byte(nil), a.host...)
		b.push(view, a.host)
	}
	return a
}

// tensor returns a tensor with the strides of a layout, without memory, and the index in memory of
// its last element.
func (l layout) tensor(d tensor.DType, shape []int64) (t tensor.Tensor, last int64) {
	t = tensor.Of(nil, d, shape...)
	order := l.order
	if order == nil {
		for i := range shape {
			order = append(order, i)
		}
	}
	step := max(l.inner, 1)
	for i := len(order) - 1; i >= 0; i-- {
		n := shape[order[i]]
		if l.far && i == 0 {
			step = 1<<31 + 5
		}
		if m := max(l.multiple, 1); i < len(order)-1 {
			step = (step + m - 1) / m * m
		}
		t.Stride[order[i]] = step
		last += max(n-1, 0) * step
		step = step*max(n, 1) + l.gap
	}
	return t, last
}

// fill writes sentinels to host, then the values, unless they are nil.
func (a *array) fill(t testing.TB, l layout, values []float64) {
	t.Helper()
	if l.far {
		a.each(func(_, at int64) { encode(a.DType, a.host[at:], math.NaN()) })
	}
	if whole := a.host[:len(a.host)/4*4]; len(whole) > 0 && !l.far {
		binary.LittleEndian.PutUint32(whole, sentinel)
		for n := 4; n < len(whole); n *= 2 {
			copy(whole[n:], whole[:n])
		}
	}
	if values != nil {
		if int64(len(values)) != a.Numel() {
			t.Fatalf("%s: %d values for %v", a.name, len(values), a.Tensor)
		}
		a.each(func(i, at int64) { encode(a.DType, a.host[at:], values[i]) })
	}
}

// spans calls f for the elements that follow each other in memory and in row-major order: with the
// index of the first, its offset in host, and their number.
func (a *array) spans(f func(i, at, n int64)) {
	outer, n := int(a.NDim), int64(1) // the axes around a span, and its length
	for outer > 0 && (a.Stride[outer-1] == n || a.Shape[outer-1] == 1) {
		outer--
		n *= a.Shape[outer]
	}
	var index [tensor.MaxDims]int64
	at, size := a.base, a.DType.Size()
	for i, all := int64(0), a.Numel(); i < all; i += n {
		f(i, at, n)
		for x := outer - 1; x >= 0; x-- {
			index[x]++
			at += a.Stride[x] * size
			if index[x] < a.Shape[x] {
				break
			}
			at -= index[x] * a.Stride[x] * size
			index[x] = 0
		}
	}
}

// each calls f with the row-major index of every element and its offset in host.
func (a *array) each(f func(i, at int64)) {
	size := a.DType.Size()
	a.spans(func(i, at, n int64) {
		for k := range n {
			f(i+k, at+k*size)
		}
	})
}

// values returns the elements in row-major order.
func (a *array) values() []float64 {
	y := make([]float64, a.Numel())
	a.each(func(i, at int64) { y[i] = decode(a.DType, a.host[at:]) })
	return y
}

// bits returns the bytes of the elements in row-major order.
func (a *array) bits() []byte {
	size := a.DType.Size()
	y := make([]byte, 0, a.Bytes())
	a.spans(func(_, at, n int64) { y = append(y, a.host[at:at+n*size]...) })
	return y
}

// checkUntouched fails the test if any byte outside a result has changed.
func (a *array) checkUntouched(t testing.TB) {
	t.Helper()
	if a.before == nil {
		return
	}
	now := a.host
	if a.written {
		now = bytes.Clone(now)
		size := a.DType.Size()
		a.spans(func(_, at, n int64) { copy(now[at:at+n*size], a.before[at:]) })
	}
	if bytes.Equal(now, a.before) {
		return
	}
	for i := range now {
		if now[i] != a.before[i] {
			t.Errorf("%s: byte %d was overwritten, %d bytes from the first element of %v", a.name, i, int64(i)-a.base,
				a.Tensor)
			return
		}
	}
}

func encode(d tensor.DType, p []byte, v float64) {
	le := binary.LittleEndian
	switch d {
	case tensor.F32:
		le.PutUint32(p, math.Float32bits(float32(v)))
	case tensor.BF16:
		le.PutUint16(p, tensor.F32ToBF16(float32(v)))
	case tensor.F16: // v is the bits: there is no conversion to F16
		le.PutUint16(p, uint16(v))
	case tensor.F64:
		le.PutUint64(p, math.Float64bits(v))
	case tensor.I32:
		le.PutUint32(p, uint32(int32(v)))
	case tensor.I64:
		le.PutUint64(p, uint64(int64(v)))
	case tensor.U8:
		p[0] = uint8(v)
	default:
		panic(fmt.Sprintf("conformance: no encoding of %v", d))
	}
}

func decode(d tensor.DType, p []byte) float64 {
	le := binary.LittleEndian
	switch d {
	case tensor.F32:
		return float64(math.Float32frombits(le.Uint32(p)))
	case tensor.BF16:
		return float64(tensor.BF16ToF32(le.Uint16(p)))
	case tensor.F16:
		return float64(le.Uint16(p))
	case tensor.F64:
		return math.Float64frombits(le.Uint64(p))
	case tensor.I32:
		return float64(int32(le.Uint32(p)))
	case tensor.I64:
		return float64(int64(le.Uint64(p)))
	case tensor.U8:
		return float64(p[0])
	}
	panic(fmt.Sprintf("conformance: no decoding of %v", d))
}

// tensor returns a tensor over device memory.
func (b *bench) tensor(p unsafe.Pointer, d tensor.DType, shape ...int64) tensor.Tensor {
	t := tensor.Of(p, d, shape...)
	t.Where = b.dev.Info().Place
	return t
}

// pull copies the buffer to host. On the CPU, and in reserved address space, host becomes the
// buffer itself.
func (a *array) pull(b *bench) []byte {
	n := a.buffer.Bytes()
	if _, ok := a.buffer.(*reserved); ok || b.dev.Info().Place == tensor.Host {
		a.host = unsafe.Slice((*byte)(a.buffer.Pointer()), n)
		return a.host
	}
	a.host = make([]byte, n)
	b.transfer(tensor.Of(unsafe.Pointer(unsafe.SliceData(a.host)), tensor.U8, n),
		b.tensor(a.buffer.Pointer(), tensor.U8, n))
	return a.host
}

// push copies host to device memory.
func (b *bench) push(view tensor.Tensor, host []byte) {
	if view.Where != tensor.Host {
		b.transfer(view, tensor.Of(unsafe.Pointer(unsafe.SliceData(host)), tensor.U8, int64(len(host))))
	}
}

func (b *bench) transfer(dst, src tensor.Tensor) {
	b.t.Helper()
	err := b.dev.Copy(b.stream, dst, src)
	if err == nil {
		err = b.stream.Sync()
	}
	if err != nil {
		b.t.Fatal(err)
	}
}
