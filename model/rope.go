package model

import (
	"math"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// Rope is the rotary position embedding. Type default is Su et al. 2021. linear divides positions
// by Factor (Chen et al. 2023). llama3 divides only the low frequencies, as in Llama 3.1.
type Rope struct {
	Type                          string // default | linear | llama3
	Theta                         float64
	Factor                        float64
	LowFreqFactor, HighFreqFactor float64
	OriginalMaxPositionEmbeddings float64
}

// readRope reads rope_parameters (transformers 5), or rope_theta with rope_scaling (transformers
// 4), and how many features of a head are rotated. The sections of multimodal positions are
// ignored: in text, time, height and width are equal.
func (c *Config) readRope(r *reader) {
	share := 1.0
	if c.hybrid() {
		share = 0.25
	}
	share = r.number("partial_rotary_factor", share)
	c.Rope = readRope(r, c.MaxPositionEmbeddings, &share)
	c.RotaryDim = int64(float64(c.HeadDim) * share)
	switch {
	case !c.hybrid():
		if share != 1 {
			r.fault(status.Unsupported, "partial_rotary_factor = %v is not built for %s: %s", share, c.ModelType, notbuilt.PartialRotary.Instead)
		}
	case c.HeadDim%2 != 0: // readHeads has reported it
	case !(share > 0 && share <= 1) || c.RotaryDim < 2 || c.RotaryDim%2 != 0:
		r.fault(status.InvalidConfig, "partial_rotary_factor = %v of head_dim = %d is %d features; set it so that an even number of at least 2 features is rotated",
			share, c.HeadDim, c.RotaryDim)
	}
}

func readRope(r *reader, maxPosition int64, share *float64) Rope {
	theta := r.positive("rope_theta", 10000)
	rope := Rope{Type: "default", Theta: theta, Factor: 1}
	name, t := "rope_parameters", r.table("rope_parameters")
	if old := r.table("rope_scaling"); t == nil {
		name, t = "rope_scaling", old
	}
	if t == nil {
		return rope
	}
	defer r.adopt(name, t)
	rope.Theta = t.positive("rope_theta", theta)
	rope.Type = t.text("rope_type", t.text("type", "default"))
	*share = t.number("partial_rotary_factor", *share)
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
		t.fault(status.Unsupported, "rope_type = %q is not built: %s", rope.Type, notbuilt.RoPETypes.Instead)
	}
	return rope
}

// Positions returns the number of positions of the model: max_position_embeddings plus the
// positions that RoPE scaling adds.
func (c *Config) Positions() int64 {
	switch c.Rope.Type {
	case "linear":
		return int64(float64(c.MaxPositionEmbeddings) * max(1, c.Rope.Factor))
	case "llama3":
		return max(c.MaxPositionEmbeddings, int64(c.Rope.OriginalMaxPositionEmbeddings*c.Rope.Factor))
	}
	return c.MaxPositionEmbeddings
}

// required reads a positive number that has no default.
func (r *reader) required(name string) float64 {
	if !r.has(name) {
		r.fault(status.InvalidConfig, "%s is missing: give a number above 0", name)
		return 1
	}
	return r.positive(name, 1)
}

// Frequencies returns the angle for one position of each pair of features, [dim/2].
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
		// Frequencies with at most LowFreqFactor turns over the original length are divided by
		// Factor, with at least HighFreqFactor turns they are kept, and between them the share is
		// linear.
		turns := r.OriginalMaxPositionEmbeddings * freq / (2 * math.Pi)
		keep := min(max((turns-r.LowFreqFactor)/(r.HighFreqFactor-r.LowFreqFactor), 0), 1)
		return freq * (keep + (1-keep)/r.Factor)
	}
	return freq
}
