package sp

import (
	"fmt"
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
)

// The halo has the rows next to a rank's own that are of the same document, from any number of
// ranks, and zeros elsewhere. Backward adds the gradients of all ranks to a row. The bytes sent are
// equal to the prediction.
func TestHalo(t *testing.T) {
	const width = 3
	specs := []BatchSpec{
		{Batch: 1, Seq: 40},
		{Batch: 2, Seq: 11, CuSeqlens: []int64{0, 1, 8, 11, 22}},
		{Batch: 3, Seq: 5},
		{Batch: 1, Seq: 2},
	}
	for _, s := range specs {
		for _, n := range mpitest.Sizes() {
			for _, rows := range []int64{1, 3, 7, -1, -4} {
				mpitest.Ranks(t, n, func(c comm.Comm) error { return checkHalo(c, s, rows, width) })
				given := s
				given.Rows = make([]int64, n)
				given.Rows[n/2], given.Rows[n-1] = s.Seq-1, given.Rows[n-1]+1 // the rest have none
				if n/2 == n-1 {
					given.Rows[n-1] = s.Seq
				}
				mpitest.Ranks(t, n, func(c comm.Comm) error { return checkHalo(c, given, rows, width) })
			}
		}
	}
}

func checkHalo(c comm.Comm, s BatchSpec, n, width int64) error {
	b := newBench()
	defer b.close()
	ledger := comm.NewLedger()
	counted := comm.NewCounted(c, "sequence", ledger, nil, nil)
	x, err := NewBatch(c, s)
	must(err)
	send, recv := x.HaloElements(c.Rank(), n, width)
	h := Halo{N: n, X: b.gapped(s.Batch, x.Rows(), 1, width).Select(2, 0),
		Rows:      b.gapped(s.Batch, max(n, -n), 1, width).Select(2, 0),
		Workspace: b.bytes((send + recv) * 4)}
	each(rowHeads(h.X), func(i, row, _, d int64, v *float32) { *v = value(1, i, x.Lo()+row, d) })
	must(h.Forward(b.dev, counted, b.stream, x))
	if sent := ledger.Get("sequence", comm.OpAllToAll).Bytes; sent != send*4 {
		return fmt.Errorf("sent %d bytes, predicted %d", sent, send*4)
	}
	// inside reports whether a row outside of this rank's rows is of the same document as the
	// nearest of them.
	cu, _ := x.Documents()
	inside := func(i, row, near int64) bool {
		for _, at := range cu {
			if at -= i * s.Seq; at > min(row, near) && at <= max(row, near) {
				return false
			}
		}
		return row >= 0 && row < s.Seq
	}
	first, nearest := x.Lo()-n, x.Lo()
	if n < 0 {
		first, nearest = x.Hi(), x.Hi()-1
	}
	each(rowHeads(h.Rows), func(i, j, _, d int64, v *float32) {
		want := float32(0)
		if x.Rows() > 0 && inside(i, first+j, nearest) {
			want = value(1, i, first+j, d)
		}
		if math.Float32bits(*v) != math.Float32bits(want) && err == nil {
			err = fmt.Errorf("%v, n %d: the halo of rows %d to %d has %v at %d of sequence %d, want %v", s, n, x.Lo(),
				x.Hi(), *v, first+j, i, want)
		}
	})
	if err != nil {
		return err
	}
	// The gradient of every halo is 1: the gradient of a row is the number of ranks that have it in
	// their halo.
	each(rowHeads(h.X), func(_, _, _, _ int64, v *float32) { *v = 100 })
	each(rowHeads(h.Rows), func(_, _, _, _ int64, v *float32) { *v = 1 })
	must(h.Backward(b.dev, counted, b.stream, x))
	if sent := ledger.Get("sequence", comm.OpAllToAll).Bytes; sent != (send+recv)*4 {
		return fmt.Errorf("sent %d bytes both ways, predicted %d", sent, (send+recv)*4)
	}
	each(rowHeads(h.X), func(i, row, _, _ int64, v *float32) {
		row += x.Lo()
		want := float32(100)
		for r := range x.Size() {
			lo, hi := x.RankRows(r)
			near, gap := lo, lo-row
			if n < 0 {
				near, gap = hi-1, row-hi+1
			}
			if lo < hi && gap > 0 && gap <= max(n, -n) && inside(i, row, near) {
				want++
			}
		}
		if *v != want && err == nil {
			err = fmt.Errorf("%v, n %d: row %d of sequence %d has gradient %v, want %v", s, n, row, i, *v, want)
		}
	})
	if err == nil {
		err = b.gapsIntact()
	}
	return err
}

// Wrong halos return an error.
func TestHaloRefused(t *testing.T) {
	b := newBench()
	defer b.close()
	x, err := newBatch(1, 3, BatchSpec{Batch: 1, Seq: 9})
	must(err)
	for name, spoil := range map[string]func(h *Halo){
		"n is 0":                    func(h *Halo) { h.N, h.Rows = 0, b.tensor(1, 0, 2) },
		"rows is":                   func(h *Halo) { h.Rows = b.tensor(1, 3, 2) },
		"x is":                      func(h *Halo) { h.X = b.tensor(1, 4, 2) },
		"workspace has 8 bytes and": func(h *Halo) { h.Workspace = b.bytes(8) },
	} {
		h := Halo{N: 2, X: b.tensor(1, 3, 2), Rows: b.tensor(1, 2, 2), Workspace: b.bytes(64)}
		spoil(&h)
		if err := h.Forward(b.dev, alone(), b.stream, x); status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := SketchBatch(3, 3, BatchSpec{Batch: 1, Seq: 9}); status.Of(err) != status.InvalidArgument {
		t.Error(err)
	}
}

// rowHeads views [B, n, W] as [B, n, 1, W].
func rowHeads(t tensor.Tensor) tensor.Tensor {
	t.NDim, t.Shape[3], t.Stride[3] = 4, t.Shape[2], t.Stride[2]
	t.Shape[2] = 1
	return t
}
