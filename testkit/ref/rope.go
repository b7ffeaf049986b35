package ref

import "math"

// RopeFrequencies returns theta^(-2i/rotary) for i in [0, rotary/2): the angle of pair i per
// position (Su et al. 2021).
func RopeFrequencies(theta float64, rotary int64) []float64 {
	f := make([]float64, rotary/2)
	for i := range f {
		f[i] = math.Pow(theta, -2*float64(i)/float64(rotary))
	}
	return f
}

// Llama3 has the parameters of the frequency scaling of Llama 3.1, see config.json.
type Llama3 struct {
	Factor, LowFreqFactor, HighFreqFactor float64
	OriginalLength                        float64 // original_max_position_embeddings
}

// Scale divides the frequencies of pairs with less than LowFreqFactor turns over the original
// length by Factor, keeps frequencies with more than HighFreqFactor turns, and interpolates
// linearly in the number of turns between them.
func (l Llama3) Scale(freq []float64) []float64 {
	y := make([]float64, len(freq))
	for i, f := range freq {
		turns := l.OriginalLength * f / (2 * math.Pi)
		keep := (turns - l.LowFreqFactor) / (l.HighFreqFactor - l.LowFreqFactor)
		keep = min(max(keep, 0), 1)
		y[i] = keep*f + (1-keep)*f/l.Factor
	}
	return y
}

// Gains returns the gain of queries at positions: 1 + beta·ln(1 + ⌊position/length⌋).
func Gains(positions []int64, beta float64, length int64) (gains []float64) {
	for _, p := range positions {
		gains = append(gains, 1+beta*math.Log(float64(1+p/length)))
	}
	return gains
}

// RopeTable returns cos and sin [T, R/2] of positions[t]·freq[i], times scale (0 = 1). The angle is
// one float32 product for every T, as transformers computes it. At position 10⁶ it may differ from
// the exact product by 0.03, so a program with exact angles would be another model.
func RopeTable[T Float](positions []int64, freq []float64, scale float64) (cos, sin []T) {
	if scale == 0 {
		scale = 1
	}
	for _, p := range positions {
		for _, f := range freq {
			s, c := math.Sincos(float64(float32(p) * float32(f)))
			cos, sin = append(cos, T(c*scale)), append(sin, T(s*scale))
		}
	}
	return cos, sin
}

// Rope rotates the pair (i, i+R/2) of every head of x [T, H, D] by the angle with the given cos and
// sin [T, R/2], and copies the features from R on. The inverse rotation is the derivative.
func Rope[T Float](tokens, heads, dim int64, x, cos, sin []T, inverse bool) []T {
	y := append([]T(nil), x...)
	if tokens == 0 {
		return y
	}
	half := int64(len(cos)) / tokens
	for t := range tokens {
		for h := range heads {
			at := (t*heads + h) * dim
			for i := range half {
				c, s := cos[t*half+i], sin[t*half+i]
				if inverse {
					s = -s
				}
				a, b := x[at+i], x[at+half+i]
				y[at+i], y[at+half+i] = a*c-b*s, b*c+a*s
			}
		}
	}
	return y
}
