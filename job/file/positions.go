package file

import (
	"fmt"
	"math"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/model"
)

// Fit applies keys of the job to the configuration of its model, and refuses what does not fit the
// model.
func (j *Job) Fit(c *model.Config) error {
	if name := c.DropsResiduals(); j.Kind == "train" && name != "" {
		return j.ModelFault(status.Errorf(status.Unsupported, "%s = %v is not built for training: %s", name,
			c.ResidualDropout, notbuilt.ResidualDropout.Instead))
	}
	if key := "optimizer.expert_bias_rate"; j.IsSet(key) {
		if err := c.AddExpertBias(); err != nil {
			return j.Errorf(status.Of(err), key, "%v, and %v", j.Optimizer.ExpertBiasRate, err)
		}
	}
	return j.checkPositions(c)
}

// checkPositions refuses sequences with more positions than the model has. The error has the line
// that extends the model.
func (j *Job) checkPositions(c *model.Config) error {
	n, most := j.Data.Sequence, c.Positions()
	if n <= most {
		return nil
	}
	key, fix := "data.sequence", ""
	if len(j.Model.New) > 0 && c.Rope.Type == "default" {
		fix = fmt.Sprintf("max_position_embeddings = %d to [model.new]", n)
	} else if scaling := extension(c, n); scaling != "" {
		if c.Rope.Type != "linear" && c.Rope.Type != "dynamic" { // which multiply this field
			fix = fmt.Sprintf("max_position_embeddings = %d, ", n)
		}
		fix = fmt.Sprintf("override = { %srope_scaling = { %s } } to [model]", fix, scaling)
	} else {
		return j.Errorf(status.InvalidConfig, key, "%d, the model has %d positions; set data.sequence = %d", n,
			most, most)
	}
	return j.Errorf(status.InvalidConfig, key, "%d, the model has %d positions; set data.sequence = %d, or add %s", n,
		most, most, fix)
}

// extension returns the fields of a rope_scaling with which the model has n positions: that of the
// model with another factor, or YaRN. It returns "" if another factor does not suffice, for phi3,
// which has longrope alone, and for a gain of queries with another length than the one of YaRN.
func extension(c *model.Config, n int64) string {
	if c.ModelType == "phi3" || c.Rope.QueryLength > 0 && c.Rope.Type != "yarn" {
		return ""
	}
	r, original := &c.Rope, c.MaxPositionEmbeddings
	factor := func(of float64) string { // rounded up to four decimals
		return number(math.Ceil(float64(n)/of*1e4) / 1e4)
	}
	switch r.Type {
	case "default", "yarn":
		more := ""
		if r.Type == "yarn" {
			original, more = int64(r.OriginalMaxPositionEmbeddings), c.YarnFields()
		}
		return fmt.Sprintf(`rope_type = "yarn", factor = %s, original_max_position_embeddings = %d%s`,
			factor(float64(original)), original, more)
	case "linear", "dynamic":
		return fmt.Sprintf(`rope_type = %q, factor = %s`, r.Type, factor(float64(original)))
	case "llama3":
		return fmt.Sprintf(
			`rope_type = "llama3", factor = %s, low_freq_factor = %s, high_freq_factor = %s, original_max_position_embeddings = %d`,
			factor(r.OriginalMaxPositionEmbeddings), number(r.LowFreqFactor), number(r.HighFreqFactor),
			int64(r.OriginalMaxPositionEmbeddings))
	}
	return ""
}

// number returns a number as TOML's floating-point type.
func number(x float64) string {
	if x == math.Trunc(x) && math.Abs(x) < 1e15 {
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%g", x)
}
