package generate

import (
	"math"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
)

// Tokens are drawn as often as the softmax over the tokens that the filters keep says. A draw
// depends on logits, seed and position alone.
func TestSampling(t *testing.T) {
	logits := []float32{1, 3, 2, 3, 0, -1, 2}
	all := func(T float64, keep ...int) []float64 {
		p, sum := make([]float64, len(logits)), 0.0
		for _, i := range keep {
			p[i] = math.Exp(float64(logits[i]) / T)
			sum += p[i]
		}
		for i := range p {
			p[i] /= sum
		}
		return p
	}
	for name, x := range map[string]struct {
		s    Sampling
		want []float64
	}{
		"greedy: the first of the largest": {Sampling{TopP: 1}, all(1, 1)},
		"temperature 1":                    {Sampling{Temperature: 1, TopP: 1}, all(1, 0, 1, 2, 3, 4, 5, 6)},
		"temperature 2":                    {Sampling{Temperature: 2, TopP: 1}, all(2, 0, 1, 2, 3, 4, 5, 6)},
		"top-k 2":                          {Sampling{Temperature: 1, TopP: 1, TopK: 2}, all(1, 1, 3)},
		"top-k 3 keeps both of the third":  {Sampling{Temperature: 1, TopP: 1, TopK: 3}, all(1, 1, 3, 2, 6)},
		"top-k above the vocabulary": {Sampling{Temperature: 1, TopP: 1, TopK: 99},
			all(1, 0, 1, 2, 3, 4, 5, 6)},
		"top-p keeps the token that crosses":    {Sampling{Temperature: 1, TopP: 0.5}, all(1, 1, 3)},
		"top-p keeps at least one":              {Sampling{Temperature: 1, TopP: 1e-9}, all(1, 1)},
		"top-p after top-k":                     {Sampling{Temperature: 1, TopK: 2, TopP: 0.9}, all(1, 1, 3)},
		"top-p among the tokens that top-k has": {Sampling{Temperature: 1, TopK: 4, TopP: 0.75}, all(1, 1, 3, 2)},
	} {
		const n = 20000
		count := make([]float64, len(logits))
		for i := range n {
			id := x.s.Next(logits, int64(i))
			if x.s.Next(logits, int64(i)) != id {
				t.Fatalf("%s: a draw does not repeat", name)
			}
			count[id]++
		}
		for i, p := range x.want {
			// five standard deviations; none where p is 0 or 1
			if e := math.Abs(count[i]/n - p); !(e <= 5*math.Sqrt(p*(1-p)/n)+1e-12) {
				t.Errorf("%s: token %d has frequency %v, want %v", name, i, count[i]/n, p)
			}
		}
	}
	a, b := Sampling{Temperature: 1, TopP: 1, Seed: 1}, Sampling{Temperature: 1, TopP: 1, Seed: 2}
	differ := 0
	for i := range int64(100) {
		if a.Next(logits, i) != b.Next(logits, i) {
			differ++
		}
	}
	if differ < 20 {
		t.Errorf("two seeds differ in %d of 100 draws", differ)
	}
}

// Logits that are NaN or +Inf are an error on every rank, and -Inf is a token that never follows.
func TestLogitsThatAreNotFinite(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, x := range []struct {
		logits []float32
		want   status.Code
	}{
		{[]float32{nan, nan, nan}, status.Numeric}, {[]float32{1, nan, 2}, status.Numeric},
		{[]float32{1, inf, 2}, status.Numeric}, {[]float32{1, -inf, 2}, status.OK},
	} {
		for _, s := range []Sampling{{TopP: 1}, {TopP: 0.9, Temperature: 1}} {
			var group sync.WaitGroup
			for rank, world := range comm.Local(2) {
				group.Go(func() {
					own, logits := s, x.logits
					if rank == 0 {
						logits = nil // the last rank has them
					}
					id, err := (&Model{world: world}).next(&own, logits, 3)
					if status.Of(err) != x.want || err == nil && id == 1 {
						t.Errorf("%v, temperature %v: rank %d: %d, %v; want %v", x.logits, s.Temperature, rank, id, err,
							x.want)
					}
				})
			}
			group.Wait()
		}
	}
}
