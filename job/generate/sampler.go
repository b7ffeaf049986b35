package generate

import (
	"cmp"
	"math"
	"slices"

	"ulysses/internal/splitmix"
)

// Sampling chooses a token from logits. The zero value chooses the token with the largest logit.
// The filters and their order are as in transformers: temperature, top-k, top-p.
type Sampling struct {
	Temperature float64 // 0 = the largest logit, without chance
	TopK        int64   // only logits not below the K-th largest; 0 = all
	TopP        float64 // only the most probable tokens with this sum (Holtzman et al. 2020); 1 = all
	Seed        uint64

	order   []int32
	weights []float64
}

// Next returns the token that follows `position` tokens. It depends on the logits, the seed and the
// position alone. Of equal logits, the lower id comes first.
func (s *Sampling) Next(logits []float32, position int64) int32 {
	best := int32(0)
	for i, x := range logits {
		if x > logits[best] {
			best = int32(i)
		}
	}
	if s.Temperature == 0 {
		return best
	}
	s.order = s.order[:0]
	for i := range logits {
		s.order = append(s.order, int32(i))
	}
	slices.SortStableFunc(s.order, func(a, b int32) int { return cmp.Compare(logits[b], logits[a]) })
	n := len(s.order)
	if k := int(s.TopK); k > 0 && k < n {
		for n = k; n < len(s.order) && logits[s.order[n]] == logits[s.order[k-1]]; n++ {
			// logits equal to the K-th largest stay
		}
	}
	s.weights = s.weights[:0]
	top, sum := float64(logits[best]), 0.0
	for _, i := range s.order[:n] {
		w := math.Exp((float64(logits[i]) - top) / s.Temperature)
		s.weights = append(s.weights, w)
		sum += w
	}
	if s.TopP < 1 {
		kept := 0.0
		for i, w := range s.weights { // the token that crosses the sum stays
			if kept += w; kept >= s.TopP*sum {
				s.weights, sum = s.weights[:i+1], kept
				break
			}
		}
	}
	at := sum * float64(splitmix.Mix(splitmix.Mix(s.Seed)+uint64(position))>>11) / (1 << 53)
	for i, w := range s.weights {
		if at -= w; at < 0 {
			return s.order[i]
		}
	}
	return s.order[len(s.weights)-1]
}
