package model

import (
	"math"

	"ulysses/internal/status"
)

// Rope says how positions become rotations. Type default is Su et al. 2021; linear divides positions by Factor (Chen et al. 2023);
// llama3 divides the slow frequencies alone, as Llama 3.1 was trained.
type Rope struct {
	Type                          string // default | linear | llama3
	Theta                         float64
	Factor                        float64
	LowFreqFactor, HighFreqFactor float64
	OriginalMaxPositionEmbeddings float64
}

// readRope reads rope_parameters (transformers 5), or rope_theta with rope_scaling (transformers 4).
func readRope(r *reader, maxPosition int64) Rope {
	theta := r.positive("rope_theta", 10000)
	rope := Rope{Type: "default", Theta: theta, Factor: 1}
	name, t := "rope_parameters", r.table("rope_parameters")
	if old := r.table("rope_scaling"); t == nil {
		name, t = "rope_scaling", old
	}
	if t == nil {
		return rope
	}
	defer r.take(name, t)
	rope.Theta = t.positive("rope_theta", theta)
	rope.Type = t.text("rope_type", t.text("type", "default"))
	if share := t.number("partial_rotary_factor", 1); share != 1 {
		t.fault(status.Unsupported, "partial_rotary_factor = %v is not built: 1 is", share)
	}
	switch rope.Type {
	case "default":
	case "linear":
		rope.Factor = t.required("factor")
	case "llama3":
		rope.Factor = t.required("factor")
		rope.LowFreqFactor = t.required("low_freq_factor")
		rope.HighFreqFactor = t.required("high_freq_factor")
		rope.OriginalMaxPositionEmbeddings = t.positive("original_max_position_embeddings", float64(maxPosition))
		if t.has("low_freq_factor") && t.has("high_freq_factor") && rope.HighFreqFactor <= rope.LowFreqFactor {
			t.fault(status.InvalidConfig, "high_freq_factor = %v must be above low_freq_factor = %v", rope.HighFreqFactor, rope.LowFreqFactor)
		}
	default:
		t.fault(status.Unsupported, "rope_type = %q is not built: default, linear and llama3 are", rope.Type)
	}
	return rope
}

// required is a positive number that has no default.
func (r *reader) required(name string) float64 {
	if !r.has(name) {
		r.fault(status.InvalidConfig, "%s is missing: give a number above 0", name)
		return 1
	}
	return r.positive(name, 1)
}

// Frequencies is the angle per position of each pair of features, [dim/2].
func (r Rope) Frequencies(dim int64) []float32 {
	f := make([]float32, dim/2)
	for i := range f {
		f[i] = float32(r.scale(math.Pow(r.Theta, -2*float64(i)/float64(dim))))
	}
	return f
}

func (r Rope) scale(freq float64) float64 {
	switch r.Type {
	case "linear":
		return freq / r.Factor
	case "llama3":
		// turns made over the original length: few turns = slow = divided, many = kept, a straight line between
		turns := r.OriginalMaxPositionEmbeddings * freq / (2 * math.Pi)
		keep := min(max((turns-r.LowFreqFactor)/(r.HighFreqFactor-r.LowFreqFactor), 0), 1)
		return freq * (keep + (1-keep)/r.Factor)
	}
	return freq
}
