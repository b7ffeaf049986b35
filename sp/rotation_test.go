package sp

import (
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// angles returns the table for this rank's rows of every sequence, by global positions.
func angles(b *bench, x *Batch, half int64) (cos, sin tensor.Tensor) {
	n := x.spec.Batch * x.Rows()
	cos, sin = b.tensor(n, half), b.tensor(n, half)
	for i := range n {
		offset := float64(x.Lo() + i%max(1, x.Rows()))
		for j := range half {
			angle := offset / math.Pow(100, float64(j)/float64(half))
			cos.Float32s()[i*half+j], sin.Float32s()[i*half+j] = float32(math.Cos(angle)), float32(math.Sin(angle))
		}
	}
	return cos, sin
}

// rotate rotates [B, n, H, D] by the table.
func rotate(b *bench, dst, src, cos, sin tensor.Tensor, inverse bool) {
	n := src.Shape[1]
	for i := range src.Shape[0] {
		must(b.dev.Rope(b.stream,
			&device.Rope{X: src.Select(0, i), Y: dst.Select(0, i), Cos: cos.Slice(0, i*n, (i+1)*n),
				Sin: sin.Slice(0, i*n, (i+1)*n), Inverse: inverse}))
	}
}

// Rotating q and k during packing, and dq and dk during unpacking, is bitwise equal to rotating
// them before and after the call. The caller's q and k do not change.
func TestRotationOnTheWay(t *testing.T) { testRotation(t, false) }

// The same with another table for q and dq.
func TestRotationByTwoTables(t *testing.T) { testRotation(t, true) }

func testRotation(t *testing.T, two bool) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		if x, err := NewBatch(c, lc.batch); err != nil || x.queries.n != x.keys.n || lc.layer.Dim < 4 {
			return err
		}
		half := lc.layer.Dim / 4 // a part of the features
		r, want := prepare(b, c, lc.layer, lc.batch, 0, 0), prepare(b, c, lc.layer, lc.batch, 0, 0)
		cos, sin := angles(b, r.x, half)
		like := func(t tensor.Tensor) tensor.Tensor { return b.gapped(t.Shape[0], t.Shape[1], t.Shape[2], t.Shape[3]) }
		q, k := like(want.a.Q), like(want.a.K)
		qCos, qSin := cos, sin
		if two {
			qCos, qSin = b.tensor(cos.Shape[0], half), b.tensor(cos.Shape[0], half)
			for i, x := range cos.Float32s() {
				gain := 1 + float32(int64(i)/half%3)/4
				qCos.Float32s()[i], qSin.Float32s()[i] = gain*x, gain*sin.Float32s()[i]
			}
		}
		rotate(b, q, want.a.Q, qCos, qSin, false)
		rotate(b, k, want.a.K, cos, sin, false)
		want.a.Q, want.a.K = q, k
		if err := want.forwardBackward(b); err != nil {
			return err
		}
		rotate(b, want.g.DQ, want.g.DQ, qCos, qSin, true)
		rotate(b, want.g.DK, want.g.DK, cos, sin, true)

		before := prepare(b, c, lc.layer, lc.batch, 0, 0)
		if r.a.Cos, r.a.Sin = cos, sin; two {
			r.a.QCos, r.a.QSin = qCos, qSin
		}
		if err := r.forwardBackward(b); err != nil {
			return err
		}
		for _, x := range []struct {
			name      string
			got, want tensor.Tensor
		}{{"out", r.a.Out, want.a.Out}, {"dq", r.g.DQ, want.g.DQ}, {"dk", r.g.DK, want.g.DK}, {"dv", r.g.DV, want.g.DV},
			{"the caller's q", r.a.Q, before.a.Q}, {"the caller's k", r.a.K, before.a.K}} {
			if err := sameBits(x.name, x.got, x.want, 0); err != nil {
				return err
			}
		}
		return b.gapsIntact()
	})
}

// Tables of another shape and different lengths of queries and keys are errors.
func TestRotationRefused(t *testing.T) {
	b := newBench()
	defer b.close()
	r := prepare(b, alone(), Layer{Heads: 2, KVHeads: 1, Dim: 8, VDim: 8}, BatchSpec{Batch: 1, Seq: 5}, 0, 0)
	good := b.tensor(5, 4)
	for name, wrong := range map[string]tensor.Tensor{"rows": b.tensor(4, 4), "angles": b.tensor(5, 5),
		"one of two": {}} {
		for table, x := range map[string][4]tensor.Tensor{"k": {wrong, good}, "q": {good, good, wrong, good},
			"q alone": {2: good, 3: good}, "sin of q": {good, good, good, wrong}} {
			r.a.Cos, r.a.Sin, r.a.QCos, r.a.QSin = x[0], x[1], x[2], x[3]
			if err := r.p.Forward(b.stream, r.x, &r.a); status.Of(err) != status.InvalidArgument {
				t.Errorf("%s, %s: %v", table, name, err)
			}
		}
	}
	cross := prepare(b, alone(), Layer{Heads: 2, KVHeads: 1, Dim: 8, VDim: 8},
		BatchSpec{Batch: 1, Seq: 5, KVSeq: 7}, 0, 0)
	cross.a.Cos, cross.a.Sin = b.tensor(5, 4), b.tensor(5, 4)
	if err := cross.p.Forward(b.stream, cross.x, &cross.a); status.Of(err) != status.InvalidArgument {
		t.Errorf("cross lengths: %v", err)
	}
}
