package model

import (
	"math"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// logitsOf returns the logits [T, V] of a sequence in one pass, with the cap of the model.
func logitsOf(r *rank, s *sequence) (all []float64) {
	r.c.Inspect = func(at string, x tensor.Tensor) error {
		if at == LogitsName {
			for _, v := range x.Float32s() {
				y := float64(v)
				if c := r.Config.LogitSoftcap; c > 0 {
					y = c * math.Tanh(y/c)
				}
				all = append(all, y)
			}
		}
		return nil
	}
	b := shard(r.comm, s)
	_, err := r.Forward(r.c, b)
	must(err)
	return all
}

// A sequence that grows by any numbers of tokens has the logits of one pass over all of it.
func TestDecoder(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		const n = 29
		s := documents(cfg.VocabSize, n)
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, n, false)
			defer r.close()
			r.set(weights(r.Model))
			want := logitsOf(r, s)
			top := 0.0
			for _, v := range want {
				top = max(top, math.Abs(v))
			}
			for _, cut := range [][]int{{n},
				{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
				{3, 1, 7, 2, 1, 15}, {16, 12, 1}} {
				d, err := r.NewDecoder(n, 5)
				if err != nil {
					return err
				}
				for range 2 { // also after Reset
					at := 0
					for _, k := range cut {
						got, err := d.Append(s.ids[at : at+k])
						if err != nil {
							return err
						}
						at += k
						for i, v := range got {
							if e := math.Abs(float64(v) - want[(at-1)*len(got)+i]); !(e <= 2e-5*top) {
								t.Fatalf("%v: logit %d after %d tokens: %v, want %v", cut, i, at, v,
									want[(at-1)*len(got)+i])
							}
						}
					}
					if _, err := d.Append(s.ids[:1]); status.Of(err) != status.InvalidArgument ||
						!strings.Contains(err.Error(), "1 tokens after 29") {
						t.Errorf("beyond the limit: %v", err)
					}
					must(d.Reset())
				}
				if _, err := d.Append([]int32{int32(cfg.VocabSize)}); err == nil {
					t.Error("a token outside of the vocabulary is accepted")
				}
				d.Close()
			}
			// training goes on as before
			if again := logitsOf(r, s); !slices.Equal(again, want) {
				t.Error("a pass after decoding has other logits")
			}
			return nil
		})
	})
}
