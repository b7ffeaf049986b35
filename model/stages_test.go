package model

import (
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/tensor"
)

// A decoder whose layers several ranks share has bitwise the logits of one rank, also after Reset,
// and each rank attaches only the parameters of its layers.
func TestDecoderStages(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		const n = 23
		s := documents(cfg.VocabSize, n)
		cuts := []int{9, 1, 1, 12}
		var want [][]float32
		decode := func(d *Decoder) (all [][]float32) {
			at := 0
			for _, k := range cuts {
				got, err := d.Append(s.ids[at : at+k])
				must(err)
				at += k
				all = append(all, slices.Clone(got))
			}
			return all
		}
		local(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, n, false)
			defer r.close()
			r.set(weights(r.Model))
			d, err := r.NewDecoder(n, 4)
			if err != nil {
				return err
			}
			defer d.Close()
			want = decode(d)
			return nil
		})
		for size := 2; size <= min(3, int(cfg.NumHiddenLayers)); size++ {
			local(t, size, func(c comm.Comm) error {
				r := newRank(comm.Local(1)[0], cfg, n, false)
				defer r.close()
				r.set(weights(r.Model))
				stage := r.Stages(int64(size), int64(c.Rank()))
				for i, g := range r.Groups() {
					if !r.Uses(stage, i) {
						g.Attach(tensor.Tensor{}, tensor.Tensor{})
					}
				}
				stage.Receive = func(x []float32) error {
					return c.SendRecv(nil, tensor.OfFloat32(x, int64(len(x))), c.Rank()-1, tensor.Tensor{}, -1)
				}
				stage.Send = func(x []float32) error {
					return c.SendRecv(nil, tensor.Tensor{}, -1, tensor.OfFloat32(x, int64(len(x))), c.Rank()+1)
				}
				d, err := r.NewStage(n, 4, stage)
				if err != nil {
					return err
				}
				defer d.Close()
				for range 2 {
					got := decode(d)
					for i := range got {
						if c.Rank() == size-1 && !slices.Equal(got[i], want[i]) {
							t.Errorf("%d ranks: other logits after append %d", size, i)
						}
					}
					must(d.Reset())
				}
				return nil
			})
		}
	})
}

// local runs f on ranks of this process, whatever number of ranks a job has.
func local(t *testing.T, n int, f func(comm.Comm) error) {
	t.Helper()
	if err := comm.RunLocal(n, f); err != nil {
		t.Fatalf("%d ranks: %v", n, err)
	}
}
