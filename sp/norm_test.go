package sp

import (
	"fmt"
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// normed returns the RMSNorm of the heads of [B, n, H, D], and its statistics [B·n, H].
func normed(b *bench, src tensor.Tensor, w HeadNorm) (y, rstd tensor.Tensor) {
	y, rstd = b.gapped(src.Shape[0], src.Shape[1], src.Shape[2], src.Shape[3]),
		b.tensor(src.Shape[0]*src.Shape[1], src.Shape[2])
	n := src.Shape[1]
	for i := range src.Shape[0] {
		must(b.dev.RMSNormForward(b.stream,
			&device.RMSNorm{X: src.Select(0, i), Y: y.Select(0, i), W: w.W, Eps: w.Eps, Centre: w.Centre,
				RStd: rstd.Slice(0, i*n, (i+1)*n).Flatten(0, 1)}))
	}
	return y, rstd
}

// Normalizing and rotating q and k during packing is bitwise equal to doing so before the call,
// also the statistics, for all shardings of heads. The caller's q and k do not change. dq and dk
// are the gradients of the normalized heads.
func TestNormOnTheWay(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		if x, err := NewBatch(c, lc.batch); err != nil || x.queries.n != x.keys.n || lc.layer.Dim < 4 {
			return err
		}
		r, want, before := prepare(b, c, lc.layer, lc.batch, 0, 0), prepare(b, c, lc.layer, lc.batch, 0, 0),
			prepare(b, c, lc.layer, lc.batch, 0, 0)
		cos, sin := angles(b, r.x, lc.layer.Dim/4)
		norm := func(q tensor.Tensor, centre float64) HeadNorm {
			w, wide := b.tensor(lc.layer.Dim), b.tensor(q.Shape[0]*q.Shape[1], q.Shape[2]+3)
			for i := range w.Float32s() {
				w.Float32s()[i] = float32(math.Sin(float64(3*i) + centre))
			}
			return HeadNorm{W: w, RStd: wide.Slice(1, 1, 1+q.Shape[2]), Eps: 1e-6, Centre: centre}
		}
		r.a.Cos, r.a.Sin, want.a.Cos, want.a.Sin = cos, sin, cos, sin
		r.a.QNorm, r.a.KNorm = norm(r.a.Q, 0), norm(r.a.K, 1)
		var qRStd, kRStd tensor.Tensor
		want.a.Q, qRStd = normed(b, want.a.Q, r.a.QNorm)
		want.a.K, kRStd = normed(b, want.a.K, r.a.KNorm)
		if err := want.forwardBackward(b); err != nil {
			return err
		}
		if err := r.forwardBackward(b); err != nil {
			return err
		}
		// [1, B·n, H, 1]
		four := func(t tensor.Tensor) tensor.Tensor { return addUnitAxis(t.Split(0, 1)) }
		for _, x := range []struct {
			name      string
			got, want tensor.Tensor
		}{{"out", r.a.Out, want.a.Out}, {"dq", r.g.DQ, want.g.DQ}, {"dk", r.g.DK, want.g.DK}, {"dv", r.g.DV, want.g.DV},
			{"q's statistics", four(r.a.QNorm.RStd), four(qRStd)},
			{"k's statistics", four(r.a.KNorm.RStd), four(kRStd)},
			{"the caller's q", r.a.Q, before.a.Q}, {"the caller's k", r.a.K, before.a.K}} {
			if err := sameBits(x.name, x.got, x.want, 0); err != nil {
				return err
			}
		}
		for _, w := range []HeadNorm{r.a.QNorm, r.a.KNorm} { // the columns beside the statistics
			for i := range w.RStd.Shape[0] {
				if row := w.RStd.Slice(0, i, i+1); math.Float32bits(*at(four(row), 0, 0, -1, 0)) != math.MaxUint32 {
					return fmt.Errorf("row %d of %v: written beside it", i, w.RStd)
				}
			}
		}
		return b.gapsIntact()
	})
}

// A norm without a rotation, of another width, or without memory for its statistics is an error.
func TestNormRefused(t *testing.T) {
	b := newBench()
	defer b.close()
	r := prepare(b, alone(), Layer{Heads: 2, KVHeads: 1, Dim: 8, VDim: 8}, BatchSpec{Batch: 1, Seq: 5}, 0, 0)
	good := HeadNorm{W: b.tensor(8), RStd: b.tensor(5, 1)}
	for name, x := range map[string]struct {
		cos  tensor.Tensor
		norm HeadNorm
	}{"no rotation": {norm: good}, "width": {b.tensor(5, 4), HeadNorm{W: b.tensor(4), RStd: good.RStd}},
		"rows":       {b.tensor(5, 4), HeadNorm{W: good.W, RStd: b.tensor(4, 1)}},
		"statistics": {b.tensor(5, 4), HeadNorm{W: good.W}},
		"heads":      {b.tensor(5, 4), HeadNorm{W: good.W, RStd: b.tensor(5, 2)}}} {
		r.a.Cos, r.a.Sin, r.a.KNorm = x.cos, x.cos, x.norm
		if err := r.p.Forward(b.stream, r.x, &r.a); status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}
