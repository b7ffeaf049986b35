package sp

import (
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Two reshards in progress at once, over uneven rows with one rank without rows, have the results
// of the blocking form.
func TestPendingAndUnevenRows(t *testing.T) {
	rows := []int64{5, 0, 2}
	err := comm.RunLocal(3, func(c comm.Comm) error {
		d, err := cpu.New(cpu.Options{Workers: 1})
		if err != nil {
			return err
		}
		defer d.Close()
		s, _ := d.NewStream()
		p, err := NewPlan(d, c, Layer{Heads: 4, KVHeads: 2, Dim: 3, VDim: 3})
		if err != nil {
			return err
		}
		b, err := NewBatch(c, BatchSpec{Batch: 2, Seq: 7, Rows: rows})
		if err != nil {
			return err
		}
		if b.Rows() != rows[c.Rank()] {
			t.Errorf("rank %d has %d rows of %v", c.Rank(), b.Rows(), rows)
		}
		lo, hi, _, _ := p.Heads()
		made := func(n ...int64) tensor.Tensor {
			x := make([]float32, tensor.Of(nil, tensor.F32, n...).Numel())
			for i := range x {
				x[i] = float32(1000*c.Rank() + i)
			}
			return tensor.OfFloat32(x, n...)
		}
		var xs, heads, back [2]tensor.Tensor
		var pending [2]Pending
		for i := range xs {
			xs[i], heads[i], back[i] = made(2, b.Rows(), 4, 3), made(2, 7, hi-lo, 3), made(2, b.Rows(), 4, 3)
			r := Reshard{Seq: xs[i : i+1], Heads: heads[i : i+1]}
			n, err := p.ReshardWorkspace(b, &r)
			if err != nil {
				return err
			}
			r.Workspace = tensor.Of(made(n/4+1).Data, tensor.U8, n)
			if err := p.StartSeqToHeads(s, b, &r, &pending[i]); err != nil {
				return err
			}
			if err := p.StartSeqToHeads(s, b, &r, &pending[i]); status.Of(err) != status.InvalidArgument {
				t.Errorf("a second start: %v", err)
			}
		}
		for i := range pending {
			if err := pending[i].Wait(); err != nil {
				return err
			}
		}
		if err := pending[0].Wait(); status.Of(err) != status.InvalidArgument {
			t.Errorf("a second wait: %v", err)
		}
		want := made(2, 7, hi-lo, 3)
		r := Reshard{Seq: xs[1:], Heads: []tensor.Tensor{want}}
		n, _ := p.ReshardWorkspace(b, &r)
		r.Workspace = tensor.Of(made(n/4+1).Data, tensor.U8, n)
		if err := p.SeqToHeads(s, b, &r); err != nil {
			return err
		}
		if !slices.Equal(heads[0].Float32s(), want.Float32s()) || !slices.Equal(heads[1].Float32s(), want.Float32s()) {
			t.Errorf("rank %d: what was started differs from what was done at once", c.Rank())
		}
		clear(back[0].Float32s())
		r = Reshard{Seq: back[:1], Heads: heads[:1], Workspace: r.Workspace}
		if err := p.StartHeadsToSeq(s, b, &r, &pending[0]); err != nil {
			return err
		}
		if err := pending[0].Wait(); err != nil {
			return err
		}
		if !slices.Equal(back[0].Float32s(), xs[0].Float32s()) {
			t.Errorf("rank %d: there and back differs", c.Rank())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestRowsThatDoNotAddUp(t *testing.T) {
	for _, rows := range [][]int64{{3, 3}, {7}, {8, -1}, {-1, 8}, {7, 1}} {
		if _, err := newBatch(0, 2, BatchSpec{Batch: 1, Seq: 7, Rows: rows}); status.Of(err) != status.InvalidArgument {
			t.Errorf("rows %v of 7: %v", rows, err)
		}
	}
}
