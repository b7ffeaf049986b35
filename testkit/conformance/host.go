package conformance

import (
	"fmt"
	"math"
	"unsafe"

	"ulysses/tensor"
)

// testHost copies between host and device. Host tensors are dense, device tensors have any strides.
// Types may differ, see testCast.
func testHost(s *suite) {
	type pair struct{ host, dev tensor.DType }
	pairs := []pair{{tensor.F32, tensor.BF16}, {tensor.BF16, tensor.F32}}
	for _, d := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F64, tensor.I32, tensor.I64, tensor.U8} {
		pairs = append(pairs, pair{d, d})
	}
	for _, p := range pairs {
		for _, shape := range [][]int64{{1}, {257}, {5, 7, 33}, {3, 0, 2}, {300000}} {
			layouts := []layout{dense, padded}
			if len(shape) == 3 {
				layouts = append(layouts, headMajor)
			}
			for _, l := range layouts {
				s.hostCase(p.host, p.dev, l, shape)
			}
		}
	}
}

func (s *suite) hostCase(host, dev tensor.DType, l layout, shape []int64) {
	n := tensor.Of(nil, dev, shape...).Numel()
	x := floats(integers(seeded(32, n), n, 200))
	if host == tensor.F32 || host == tensor.BF16 {
		if x = normalAs(host, seeded(32, n), n); n > 5 {
			x[3], x[4] = math.NaN(), math.Inf(-1)
		}
	}
	name := fmt.Sprintf("%v%v %v as %v", host, shape, l, dev)
	s.check(name+" in", []want{want{name: "dst", ref: x, exact: true}.as(dev)}, func(b *bench) ([]*array, error) {
		dst := b.out("dst", dev, l, shape...)
		return []*array{dst}, b.dev.Copy(b.stream, dst.Tensor, hostTensor(host, x, shape))
	})
	from := rounded(dev, x)
	s.check(name+" out", []want{want{name: "dst", ref: rounded(host, from), exact: true}},
		func(b *bench) ([]*array, error) {
			src, memory := b.in("src", dev, l, from, shape...), hostTensor(host, make([]float64, n), shape)
			if err := b.dev.Copy(b.stream, memory, src.Tensor); err != nil {
				return nil, err
			}
			if err := b.stream.Sync(); err != nil {
				return nil, err
			}
			back := b.out("back", host, dense, shape...)
			return []*array{back}, b.dev.Copy(b.stream, back.Tensor, memory)
		})
}

// hostTensor returns a tensor of values in Go memory.
func hostTensor(d tensor.DType, x []float64, shape []int64) tensor.Tensor {
	memory := make([]byte, int64(len(x))*d.Size()+8)
	for i, v := range x {
		encode(d, memory[int64(i)*d.Size():], v)
	}
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(memory)), d, shape...)
}
