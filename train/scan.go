package train

import (
	"ulysses/device"
	"ulysses/tensor"
)

// scanBlock is the number of values that are copied to the host at a time.
const scanBlock = 1 << 18

// scanner searches tensors for NaN and Inf. It copies them to the host block by block.
type scanner struct {
	dev    device.Device
	stream device.Stream
	// barrier is called before the host waits for a device: all ranks must have enqueued their
	// collectives.
	barrier func() error
	block   []float32
}

// badValues describes the values of a tensor that are NaN or Inf.
type badValues struct {
	count, of int64   // number of such values, and of all values
	first     int64   // row-major index of the first such value
	value     float32 // the first such value
}

// scan searches a tensor, which may be strided or nil. Without look it only calls the barrier.
// Collective over the ranks of the barrier.
func (x *scanner) scan(t tensor.Tensor, look bool) (bad badValues, err error) {
	if x.dev.Info().Place != tensor.Host {
		if err := x.barrier(); err != nil {
			return bad, err
		}
	}
	if !look || t.IsNil() || t.Numel() == 0 {
		return bad, nil
	}
	if x.block == nil {
		x.block = make([]float32, scanBlock)
	}
	bad.of = t.Numel()
	return bad, x.walk(t, 0, t.Dims(), &bad)
}

// walk halves a tensor until it fits the block. base is the row-major index of its first element in
// the whole tensor, of the given shape.
func (x *scanner) walk(t tensor.Tensor, base int64, whole []int64, bad *badValues) error {
	dims := t.Dims()
	if n := t.Numel(); n > int64(len(x.block)) {
		axis := 0
		for a := range dims {
			if dims[a] > dims[axis] {
				axis = a
			}
		}
		half, step := dims[axis]/2, int64(1)
		for _, d := range whole[axis+1:] {
			step *= d
		}
		if err := x.walk(t.Slice(axis, 0, half), base, whole, bad); err != nil {
			return err
		}
		return x.walk(t.Slice(axis, half, dims[axis]), base+half*step, whole, bad)
	}
	values := x.block[:t.Numel()]
	if err := device.CopyAnywhere(x.dev, x.stream, tensor.OfFloat32(values, dims...), t); err != nil {
		return err
	}
	if err := x.stream.Sync(); err != nil {
		return err
	}
	for i, v := range values {
		if v-v == 0 { // finite
			continue
		}
		index := base + ravel(unravel(int64(i), dims), whole)
		if bad.count == 0 || index < bad.first {
			bad.first, bad.value = index, v
		}
		bad.count++
	}
	return nil
}

// unravel returns the multi-index of the i-th element in row-major order.
func unravel(i int64, shape []int64) []int64 {
	at := make([]int64, len(shape))
	for a := len(shape) - 1; a >= 0; a-- {
		at[a], i = i%shape[a], i/shape[a]
	}
	return at
}

// ravel returns the row-major index of a multi-index.
func ravel(at, shape []int64) (i int64) {
	for a := range at {
		i = i*shape[a] + at[a]
	}
	return i
}
