package train

import (
	"ulysses/device"
	"ulysses/tensor"
)

// scanPiece is the values that are brought to the host at a time.
const scanPiece = 1 << 18

// scanner looks for values that are not finite, wherever a tensor lies, in a piece of the host's
// memory.
type scanner struct {
	dev    device.Device
	stream device.Stream
	meet   func() error // of ranks, before one of them waits for its device
	piece  []float32
}

// badValues is what is not finite in a tensor.
type badValues struct {
	count, of int64
	first     int64 // its place, counted row by row
	value     float32
}

// scan looks at a tensor, strided or not, or at none. Without look it only keeps step with the
// ranks that do.
func (x *scanner) scan(t tensor.Tensor, look bool) (bad badValues, err error) {
	if x.dev.Info().Place != tensor.Host {
		if err := x.meet(); err != nil {
			return bad, err
		}
	}
	if !look || t.IsNil() || t.Numel() == 0 {
		return bad, nil
	}
	if x.piece == nil {
		x.piece = make([]float32, scanPiece)
	}
	bad.of = t.Numel()
	return bad, x.walk(t, 0, t.Dims(), &bad)
}

// walk halves a tensor until it fits the piece. base is its first element's place in the whole,
// whose shape is given.
func (x *scanner) walk(t tensor.Tensor, base int64, whole []int64, bad *badValues) error {
	dims := t.Dims()
	if n := t.Numel(); n > int64(len(x.piece)) {
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
	values := x.piece[:t.Numel()]
	if err := x.dev.Copy(x.stream, tensor.OfFloat32(values, dims...), t); err != nil {
		return err
	}
	if err := x.stream.Sync(); err != nil {
		return err
	}
	for i, v := range values {
		if v-v == 0 { // neither NaN nor infinite
			continue
		}
		place := base + ravel(unravel(int64(i), dims), whole)
		if bad.count == 0 || place < bad.first {
			bad.first, bad.value = place, v
		}
		bad.count++
	}
	return nil
}

// unravel is the multi-index of an element.
func unravel(i int64, shape []int64) []int64 {
	at := make([]int64, len(shape))
	for a := len(shape) - 1; a >= 0; a-- {
		at[a], i = i%shape[a], i/shape[a]
	}
	return at
}

// ravel is the place of a multi-index, counted row by row.
func ravel(at, shape []int64) (i int64) {
	for a := range at {
		i = i*shape[a] + at[a]
	}
	return i
}
