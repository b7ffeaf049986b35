package comm

import (
	"encoding/binary"
	"math"
	"unsafe"

	"ulysses/tensor"
)

var reducedTypes = []tensor.DType{tensor.F32, tensor.F64, tensor.BF16, tensor.I32, tensor.I64}

// operand returns element k of a rank's argument. The sums of these values in F32 depend on the
// order.
func operand(rank int, k int64) float64 {
	return float64((int64(rank+1)*(k+3)*7919)%20011-10000) * float64(int64(1)<<((k+int64(rank))%9))
}

func put(t tensor.Tensor, k int64, v float64) {
	switch t.DType {
	case tensor.F32:
		t.Float32s()[k] = float32(v / 3)
	case tensor.F64:
		t.Float64s()[k] = v / 3
	case tensor.BF16:
		view[uint16](t.Data, k, 1)[0] = tensor.F32ToBF16(float32(v / 3))
	case tensor.I32:
		t.Int32s()[k] = int32(v)
	case tensor.I64:
		t.Int64s()[k] = int64(v)
	}
}

func newOperand(d tensor.DType, rank int, n int64) tensor.Tensor {
	t := newTensor(d, n)
	for k := range n {
		put(t, k, operand(rank, k))
	}
	return t
}

// expected returns the bits of element k of a reduction over all ranks in rank order. A float64 sum
// of two float32 values, rounded to float32, is their float32 sum, so float64 serves every float
// type.
func expected(d tensor.DType, op Op, size int, k int64) (bits int64) {
	var words [1]int64
	one := tensor.Of(unsafe.Pointer(&words), d, 1)
	get := func(r int) float64 {
		put(one, 0, operand(r, k))
		switch d {
		case tensor.F32:
			return float64(one.Float32s()[0])
		case tensor.F64:
			return one.Float64s()[0]
		case tensor.BF16:
			return float64(tensor.BF16ToF32(uint16(words[0])))
		}
		return math.Trunc(operand(r, k))
	}
	acc := get(0)
	for r := 1; r < size; r++ {
		switch x := get(r); op {
		case Max:
			acc = math.Max(acc, x)
		case Min:
			acc = math.Min(acc, x)
		default:
			acc += x
		}
		if d == tensor.F32 || d == tensor.BF16 {
			acc = float64(float32(acc))
		}
	}
	switch d {
	case tensor.F32:
		return int64(math.Float32bits(float32(acc)))
	case tensor.F64:
		return int64(math.Float64bits(acc))
	case tensor.BF16:
		return int64(tensor.F32ToBF16(float32(acc)))
	case tensor.I32:
		return int64(uint32(int32(acc)))
	}
	return int64(acc)
}

func checkReduced(what string, t tensor.Tensor, first int64, op Op, size int) error {
	raw, width := t.RawBytes(), t.DType.Size()
	for k := range t.Numel() {
		var got [8]byte
		copy(got[:], raw[k*width:(k+1)*width])
		if got, want := int64(binary.LittleEndian.Uint64(got[:])), expected(t.DType, op, size, first+k); got != want {
			return wrong("%s of %v, reduction %d: element %d is %x, want %x", what, t, op, k, got, want)
		}
	}
	return nil
}

func suiteAllReduce(c Comm) error {
	for _, d := range reducedTypes {
		for _, op := range []Op{Sum, Max, Min} {
			for _, n := range []int64{0, 1, 5, 2049, 33001} { // the last is larger than smallReduce
				if n == 33001 && op == Min {
					continue
				}
				t := newOperand(d, c.Rank(), n)
				if err := c.AllReduce(nil, t, op); err != nil {
					return err
				}
				if err := checkReduced("all-reduce", t, 0, op, c.Size()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func suiteNaN(c Comm) error {
	for _, op := range []Op{Sum, Max, Min} {
		x := []float32{1, 2}
		if c.Rank() == c.Size()-1 {
			x[1] = float32(math.NaN())
		}
		if err := c.AllReduce(nil, tensor.OfFloat32(x, 2), op); err != nil {
			return err
		}
		if x[1] == x[1] || x[0] != x[0] {
			return wrong("reduction %d of a NaN on one rank: %v", op, x)
		}
	}
	return nil
}

func suiteAllGather(c Comm) error {
	for _, d := range allTypes {
		for _, scale := range []int64{1, 3001} {
			var rows []int64
			for j := range c.Size() {
				rows = append(rows, int64((j*2+1)%3)*scale) // ranks 1, 4, 7 have none
			}
			all := newTensor(d, total(rows), 3)
			own := all.Slice(0, before(rows, c.Rank()), before(rows, c.Rank()+1)) // in place
			if scale == 1 {
				own = newTensor(d, rows[c.Rank()], 3)
			}
			for k, b := 0, own.RawBytes(); k < len(b); k++ {
				b[k] = pattern(c.Rank(), 0, int64(k), 0)
			}
			if err := c.AllGather(nil, all, own, rows); err != nil {
				return err
			}
			at, b := int64(0), all.RawBytes()
			for j, n := range rows {
				for k := range n * rowBytes(all) {
					if got := b[at+k]; got != pattern(j, 0, k, 0) {
						return wrong("all-gather of %v: byte %d of rank %d is %d", all, k, j, got)
					}
				}
				at += n * rowBytes(all)
			}
		}
	}
	return nil
}

func suiteReduceScatter(c Comm) error {
	for _, d := range reducedTypes {
		for _, scale := range []int64{1, 5000} {
			var rows []int64
			for j := range c.Size() {
				rows = append(rows, int64((j*2+1)%3)*scale)
			}
			first := before(rows, c.Rank()) * 3
			have := total(rows) + int64(c.Rank()%2) // some ranks have more rows than are moved
			src := newOperand(d, c.Rank(), have*3).View(have, 3)
			dst := src.Slice(0, before(rows, c.Rank()), before(rows, c.Rank()+1)) // in place
			if scale == 1 {
				dst = newTensor(d, rows[c.Rank()], 3)
			}
			if err := c.ReduceScatter(nil, dst, src, rows); err != nil {
				return err
			}
			if err := checkReduced("reduce-scatter", dst.View(dst.Numel()), first, Sum, c.Size()); err != nil {
				return err
			}
		}
	}
	return nil
}
