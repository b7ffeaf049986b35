package cuda

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// TestColumnBands: if the partial sums of all columns do not fit into a stream's scratch, groups of
// columns are summed one after another. The sums of the last columns must be bitwise equal to the
// sums of a call with these columns alone.
func TestColumnBands(t *testing.T) {
	b := newBench(t)
	if !b.d.Details().Emulated {
		t.Skip("SKIPPED: only the emulated plug-in's scratch is this small")
	}
	var err error
	b.s, err = b.d.newStream(forComm) // whose scratch is smaller
	b.must(err)
	t.Cleanup(b.s.Close)
	const scratch, rest = 1 << 12, 40 // scratch: floats
	// of returns columns [lo, n) of a row of F32, as a tensor of `axes` axes.
	of := func(seed, axes int, lo, n int64) tensor.Tensor {
		var x []byte
		for c := lo; c < n; c++ {
			v := float32(int64(seed)*(c*7+3)%101-50) / 64
			x = binary.LittleEndian.AppendUint32(x, math.Float32bits(v))
		}
		if axes == 1 {
			return b.put(x, 0, tensor.F32, n-lo)
		}
		return b.put(x, 0, tensor.F32, 1, n-lo)
	}
	low := func(x tensor.Tensor) tensor.Tensor {
		y := b.put(make([]byte, x.Bytes()/2), 0, tensor.BF16, x.Dims()...)
		b.must(b.d.Copy(b.s, y, x))
		return y
	}
	for _, c := range []struct {
		name string
		n    int64 // columns that fit
		sums func(lo, n int64) []tensor.Tensor
	}{
		{"ColumnSum", scratch, func(lo, n int64) []tensor.Tensor {
			dst := of(1, 1, lo, n)
			b.must(b.d.ColumnSum(b.s, dst, of(2, 2, lo, n)))
			return []tensor.Tensor{dst}
		}},
		{"RMSNormBackward", scratch, func(lo, n int64) []tensor.Tensor {
			dy, dw := of(4, 2, lo, n), of(1, 1, lo, n)
			b.must(b.d.RMSNormBackward(b.s, &device.RMSNormGrad{X: of(2, 2, lo, n), W: of(3, 1, lo, n),
				RStd: of(5, 1, 0, 1), DY: dy, DX: dy, DW: dw}))
			return []tensor.Tensor{dw}
		}},
		{"GatedRMSNormBackward", scratch, func(lo, n int64) []tensor.Tensor {
			gate, dy, dw := of(6, 2, lo, n), of(4, 2, lo, n), of(1, 1, lo, n)
			b.must(b.d.GatedRMSNormBackward(b.s, &device.GatedRMSNormGrad{X: of(2, 2, lo, n), W: of(3, 1, lo, n),
				RStd: of(5, 1, 0, 1), Gate: gate, DY: dy, DX: dy, DGate: gate, DW: dw}))
			return []tensor.Tensor{dw}
		}},
		{"DeltaGatesBackward", scratch / 2, func(lo, n int64) []tensor.Tensor {
			x, y, dlog, dbias := low(of(2, 2, lo, n)), low(of(3, 2, lo, n)), of(1, 1, lo, n), of(7, 1, lo, n)
			b.must(b.d.DeltaGatesBackward(b.s, &device.DeltaGatesGrad{A: x, B: y, ALog: of(4, 1, lo, n),
				DtBias: of(5, 1, lo, n), DG: of(6, 2, lo, n), DBeta: of(8, 2, lo, n), DA: x, DB: y,
				DALog: dlog, DDtBias: dbias}))
			return []tensor.Tensor{dlog, dbias, x, y}
		}},
	} {
		n := c.n + rest
		whole, last := c.sums(0, n), c.sums(c.n, n)
		for i := range whole {
			all, some := b.get(whole[i]), b.get(last[i])
			if !bytes.Equal(all[int64(len(all))/n*c.n:], some) {
				t.Errorf("%s: result %d of the last %d of %d columns depends on the others", c.name, i, rest, n)
			}
		}
	}
}
