package sp

import (
	"fmt"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Restore computes from the output and the LSE what Forward has saved, bitwise equal: gradients are
// also equal. It sends the predicted bytes and allocates nothing.
func TestRestore(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		count := &counted{Comm: c}
		want := prepare(b, count, lc.layer, lc.batch, 0, 0)
		if err := want.forwardBackward(b); err != nil {
			return err
		}
		r := prepare(b, count, lc.layer, lc.batch, 0, 0)
		saved, lse := r.p.SeparateSizes(r.x)
		if whole := r.p.Sizes(r.x).Saved; saved > whole || saved+lse+b.dev.Info().Align <= whole {
			return fmt.Errorf("%d bytes and %d of LSE apart, %d together", saved, lse, whole)
		}
		if s, l, err := r.p.MaxSeparateSizes(lc.batch.Batch, lc.batch.Seq, lc.batch.KVSeq); err != nil || s < saved &&
			lc.batch.Rows == nil || l != lse {
			return fmt.Errorf("at most %d bytes and %d, of this batch %d and %d: %v", s, l, saved, lse, err)
		}
		r.a.Saved, r.a.SavedLSE = b.bytes(saved), b.bytes(lse)
		must(r.p.Forward(b.stream, r.x, &r.a))
		r.a.Saved = b.bytes(saved) // lost
		count.bytes, count.calls = 0, 0
		restore := func() { must(r.p.Restore(b.stream, r.x, &r.a)) }
		restore()
		if bytes := r.p.RestoreBytesSent(r.x); count.bytes != bytes || count.calls != 2*min(1, c.Size()-1) {
			return fmt.Errorf("restoring sent %d bytes in %d all-to-alls, planned %d in 2", count.bytes,
				count.calls, bytes)
		}
		must(r.p.Backward(b.stream, r.x, &r.a, &r.g))
		for _, x := range []struct {
			name      string
			got, want tensor.Tensor
		}{{"out", r.a.Out, want.a.Out}, {"dq", r.g.DQ, want.g.DQ}, {"dk", r.g.DK, want.g.DK},
			{"dv", r.g.DV, want.g.DV}} {
			if err := sameBits(x.name, x.got, x.want, 0); err != nil {
				return err
			}
		}
		if c.Size() == 1 {
			if n := testing.AllocsPerRun(3, restore); n > 0 {
				return fmt.Errorf("restoring allocates %v times", n)
			}
		}
		return b.gapsIntact()
	})
}

// Memory that is missing or too small is an error before anything is sent.
func TestRestoreRefusals(t *testing.T) {
	b := newBench()
	defer b.close()
	r := prepare(b, alone(), Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true},
		BatchSpec{Batch: 1, Seq: 20}, 0, 0)
	saved, lse := r.p.SeparateSizes(r.x)
	for name, a := range map[string][2]tensor.Tensor{
		"no saved":        {{}, b.bytes(lse)},
		"no saved_lse":    {b.bytes(saved), {}},
		"short saved":     {b.bytes(saved - 1), b.bytes(lse)},
		"short saved_lse": {b.bytes(saved), b.bytes(lse - 1)},
	} {
		r.a.Saved, r.a.SavedLSE = a[0], a[1]
		if err := r.p.Restore(b.stream, r.x, &r.a); status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}
