package model

import "math"

// Rope is the rotary position embedding (Su et al. 2021), with one of these extensions to longer
// sequences. Each is computed as transformers does, in the same order of F32 operations, because
// at long positions a frequency that is rounded in another way rotates by another angle.
//
//	default       theta^(-2k/d) for pair k of d features
//	linear        all frequencies divided by Factor (Chen et al. 2023)
//	dynamic       another theta if a document is longer than the model's positions
//	yarn          low frequencies divided by Factor, high ones kept (Peng et al. 2023)
//	longrope      each frequency divided by its own factor, of one of two lists (Ding et al. 2024)
//	llama3        as yarn, with other limits, as in Llama 3.1
//	proportional  a share of the pairs is rotated, with the exponents of all features
type Rope struct {
	Type          string
	Theta, Factor float64

	LowFreqFactor, HighFreqFactor float64 // llama3: turns over the original length
	// positions of the training before the extension; of type dynamic max_position_embeddings
	OriginalMaxPositionEmbeddings float64

	BetaFast, BetaSlow float64 // yarn: turns over the original length
	Exact              bool    // yarn: the limits of the ramp are not rounded to whole pairs
	// longrope, [d/2]: for batches of at most, or of more than, the original length
	ShortFactor, LongFactor []float64

	Scale float64 // of cos and sin (attention_factor); 0 = 1
	// of the scores of latent attention, with scaled positions and mscale_all_dim; 0 = 1
	ScoreGain float64 `json:",omitempty"`
	Share     float64 // proportional: of the features, that are rotated
	// a rotated query is multiplied by 1 + QueryBeta·ln(1 + ⌊position/QueryLength⌋) (Ministral 3)
	QueryBeta   float64 `json:",omitempty"`
	QueryLength int64   `json:",omitempty"`
}

// Switches reports whether the frequencies depend on the longest document of the batch.
func (r *Rope) Switches() bool { return r.Type == "dynamic" || r.Type == "longrope" }

// Switches reports whether RoPE's frequencies depend on the longest document of the batch. Then a
// pass needs Batch.Length.
func (c *Config) Switches() bool {
	return c.Rope.Switches() || c.LocalRope != nil && c.LocalRope.Switches()
}

// Positions returns the number of positions of the model: max_position_embeddings plus the
// positions that RoPE scaling adds.
func (c *Config) Positions() int64 {
	most := float64(c.MaxPositionEmbeddings)
	switch c.Rope.Type {
	case "linear", "dynamic", "proportional":
		most *= max(1, c.Rope.Factor)
	case "llama3", "yarn", "longrope":
		most = max(most, c.Rope.OriginalMaxPositionEmbeddings*c.Rope.Factor)
	}
	return int64(min(most, 1<<53))
}

// Frequencies returns the angle for one position of each pair of dim features, for batches whose
// largest position is n - 1. n matters only if the frequencies switch.
func (r *Rope) Frequencies(dim, n int64) []float32 {
	f := make([]float32, dim/2)
	r.frequencies(f, dim, n)
	return f
}

func (r *Rope) frequencies(f []float32, dim, n int64) {
	theta, d := r.Theta, float32(dim)
	if r.Type == "dynamic" && float64(n) > r.OriginalMaxPositionEmbeddings {
		grown := float32(r.Factor)*float32(n)/float32(r.OriginalMaxPositionEmbeddings) - float32(r.Factor-1)
		theta = float64(float32(theta) * float32(math.Pow(float64(grown), float64(dim)/float64(dim-2))))
	}
	// power returns theta^(2k/d), rounded once.
	power := func(k int) float32 { return float32(math.Pow(theta, float64(float32(2*k)/d))) }
	switch r.Type {
	case "longrope":
		factors := r.ShortFactor
		if float64(n) > r.OriginalMaxPositionEmbeddings {
			factors = r.LongFactor
		}
		for k := range f {
			f[k] = 1 / (float32(factors[k]) * power(k))
		}
	case "yarn":
		r.yarn(f, dim, power)
	case "llama3":
		for k := range f {
			f[k] = r.llama3(1 / power(k))
		}
	case "proportional":
		rotated := int(r.Share * float64(dim) / 2)
		for k := range f {
			if f[k] = 0; k < rotated {
				f[k] = 1 / power(k) / float32(r.Factor)
			}
		}
	default:
		for k := range f {
			f[k] = 1 / power(k)
			if r.Type == "linear" {
				f[k] /= float32(r.Factor)
			}
		}
	}
}

// yarn keeps the frequencies of pairs with more than BetaFast turns over the original length,
// divides those with less than BetaSlow turns by Factor, and interpolates linearly in the pair's
// number between them.
func (r *Rope) yarn(f []float32, dim int64, power func(k int) float32) {
	pair := func(turns float64) float64 { // with so many turns
		return float64(dim) * math.Log(r.OriginalMaxPositionEmbeddings/(turns*2*math.Pi)) / (2 * math.Log(r.Theta))
	}
	lo, hi := pair(r.BetaFast), pair(r.BetaSlow)
	if !r.Exact {
		lo, hi = math.Floor(lo), math.Ceil(hi)
	}
	lo, hi = max(lo, 0), min(hi, float64(dim-1))
	if lo == hi {
		hi += 0.001
	}
	for k := range f {
		ramp := min(max((float32(k)-float32(lo))/float32(hi-lo), 0), 1)
		keep := 1 - ramp
		p := power(k)
		f[k] = 1/(float32(r.Factor)*p)*(1-keep) + 1/p*keep
	}
}

// llama3 keeps a frequency with at least HighFreqFactor turns over the original length, divides it
// by Factor if it has at most LowFreqFactor turns, and interpolates linearly in the number of turns
// between them. As in PyTorch, a number divided by a tensor is the number times the reciprocal. The
// order of roundings matters: the difference in smooth enlarges them.
func (r *Rope) llama3(f float32) float32 {
	length := float32(r.OriginalMaxPositionEmbeddings)
	wave := 1 / f * float32(2*math.Pi)
	low, high := float32(r.OriginalMaxPositionEmbeddings/r.LowFreqFactor),
		float32(r.OriginalMaxPositionEmbeddings/r.HighFreqFactor)
	switch {
	case wave > low:
		return f / float32(r.Factor)
	case wave < high:
		return f
	}
	smooth := (1/wave*length - float32(r.LowFreqFactor)) / float32(r.HighFreqFactor-r.LowFreqFactor)
	return (1-smooth)*f/float32(r.Factor) + smooth*f
}
