package cuda

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// TestConv1dBands: if the sums of all channels do not fit into a stream's scratch, groups of
// channels are computed one after another. The results must be bitwise equal to the results of each
// half of the channels.
func TestConv1dBands(t *testing.T) {
	b := newBench(t)
	if !b.d.Details().Emulated {
		t.Skip("SKIPPED: only the emulated plug-in's scratch is this small")
	}
	for _, c := range []struct{ channels, width, rows int64 }{{9500, 4, 3}, {300, 100, 2}} {
		values := func(seed float64, n int64) []byte {
			var x []byte
			for i := range n {
				x = binary.LittleEndian.AppendUint32(x, math.Float32bits(float32(math.Sin(seed+1.7*float64(i)))))
			}
			return x
		}
		n, w, rows := c.channels, c.width, c.rows
		x, dy, before := values(1, rows*n), values(2, rows*n), values(3, (w-1)*n)
		weights, dw := values(4, n*w), values(5, n*w)
		// run returns the gradient for some channels; dx overwrites dy.
		run := func(lo, hi int64) [3][]byte {
			columns := func(all []byte, rows int64) tensor.Tensor {
				return b.put(all, 0, tensor.F32, rows, n).Slice(1, lo, hi)
			}
			y, sums, early := columns(dy, rows), b.put(dw[4*lo*w:4*hi*w], 0, tensor.F32, hi-lo, w), columns(before, w-1)
			b.must(b.d.Conv1dBackward(b.s, &device.Conv1dGrad{
				Conv1d: device.Conv1d{X: columns(x, rows), W: b.put(weights[4*lo*w:4*hi*w], 0, tensor.F32, hi-lo, w),
					Before: columns(before, w-1), Cu: []int64{0, rows}},
				DY: y, DX: y, DW: sums, DBefore: early}))
			dense := func(x tensor.Tensor) []byte {
				y := b.put(make([]byte, x.Bytes()), 0, tensor.F32, x.Dims()...)
				b.must(b.d.Copy(b.s, y, x))
				return b.get(y)
			}
			return [3][]byte{dense(y), b.get(sums), dense(early)}
		}
		half := n / 2
		whole, left, right := run(0, n), run(0, half), run(half, n)
		for i, rows := range []int64{rows, 1, w - 1} { // dw is one row
			for r := range rows {
				size := func(x []byte) int64 { return int64(len(x)) / rows }
				a, l, r2 := size(whole[i]), size(left[i]), size(right[i])
				row := append(bytes.Clone(left[i][r*l:(r+1)*l]), right[i][r*r2:(r+1)*r2]...)
				if !bytes.Equal(whole[i][r*a:(r+1)*a], row) {
					t.Errorf("%d channels, width %d: %s depends on the other channels", n, w,
						[]string{"dx", "dw", "dbefore"}[i])
					break
				}
			}
		}
	}
}
