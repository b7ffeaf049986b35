package model

import (
	"fmt"
	"maps"
	"math"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// originalLength is the field with the positions of the training before RoPE was extended.
const originalLength = "original_max_position_embeddings"

// queryBeta is the field with the growth of the gain of queries, which Llama 4 introduced.
const queryBeta = "llama_4_scaling_beta"

// readRope reads rope_parameters (transformers 5), or rope_theta with rope_scaling (transformers
// 4), and how many features of a head are rotated. The sections of multimodal positions are
// ignored: in text, time, height and width are equal.
func (c *Config) readRope(r *reader) {
	c.acceptNullShare(r)
	share := r.number("partial_rotary_factor", c.rotaryShare())
	theta := r.positive("rope_theta", c.family.theta)
	name, t := ropeTable(r)
	var local *reader
	if c.family.localTheta > 0 {
		name, t, local = localTables(r)
		own := c.family.localTheta
		if c.family.localField != "" {
			own = r.positive(c.family.localField, own)
		}
		rope, localShare := c.readRopeTable(r, "rope_parameters."+slidingAttention, local, own, share)
		c.LocalRope = &rope
		c.warnTruncate(r, "rope_parameters."+slidingAttention, &rope)
		c.rotated(r, &rope, localShare)
	} else if t != nil && (t.raw[fullAttention] != nil || t.raw[slidingAttention] != nil) {
		r.fault(status.Unsupported, "%s has a table for each kind of layer, which is not built for %s: %s", name,
			c.ModelType, notbuilt.LayerRoPE.Instead)
		return
	}
	c.Rope, share = c.readRopeTable(r, name, t, theta, share)
	if c.warnThetas(r, t, local); c.LocalRope != nil {
		c.warnTruncate(r, name, &c.Rope)
	}
	c.RotaryDim = c.rotated(r, &c.Rope, share)
	c.checkRope(r, name, &c.Rope)
	if c.LocalRope != nil {
		c.checkRope(r, "rope_parameters."+slidingAttention, c.LocalRope)
	}
}

// acceptNullShare accepts a null of partial_rotary_factor where the share is 1 in any case.
func (c *Config) acceptNullShare(r *reader) {
	if c.family.rotaryShare == 0 {
		r.accepts("partial_rotary_factor")
	}
}

// rotated returns the number of features of a head that are rotated. share is
// partial_rotary_factor. Proportional RoPE has frequencies for all features, and rotated sets its
// Share; the frequencies beyond the share are 0.
func (c *Config) rotated(r *reader, rope *Rope, share float64) int64 {
	if rope.Type == "proportional" {
		if rope.Share = share; !(share >= 0 && share <= 1) {
			r.fault(status.InvalidConfig, "partial_rotary_factor = %v: give a number from 0 to 1", share)
		}
		return c.rotatable()
	}
	dim := int64(float64(c.rotatable()) * share)
	switch {
	case c.family.rotaryShare == 0:
		if share != 1 {
			r.fault(status.Unsupported, "partial_rotary_factor = %v is not built for %s: %s", share, c.ModelType,
				notbuilt.PartialRotary.Instead)
		}
	case c.rotatable()%2 != 0: // readHeads has reported it
	case !(share > 0 && share <= 1) || dim < 2 || dim%2 != 0:
		r.fault(status.InvalidConfig,
			"partial_rotary_factor = %v of head_dim = %d is %d features; set it so that an even number of at least 2 features is rotated",
			share, c.HeadDim, dim)
	}
	return dim
}

// localTables returns the tables of RoPE's parameters of full attention, with its name, and of
// sliding attention, which may be nil. As in transformers, a rope_scaling changes fields of full
// attention only, and a table that is null is the same as a missing one. truncate beside the tables
// is the default of both.
func localTables(r *reader) (name string, full, local *reader) {
	name = "rope_parameters." + fullAttention
	if both := r.table("rope_parameters"); both != nil {
		full, local = both.table(fullAttention), both.table(slidingAttention)
		both.accepts("truncate")
		if both.raw["rope_type"] != nil || both.raw["rope_theta"] != nil {
			both.fault(status.InvalidConfig, "rope_type and rope_theta belong into the tables %s and %s", fullAttention,
				slidingAttention)
		} else if both.flag("truncate", true); r.strict {
			both.unknown()
		}
		r.adopt("rope_parameters", both)
	}
	if old := r.table("rope_scaling"); old != nil && len(old.raw) > 0 {
		merged := map[string]any{}
		if name = "rope_scaling"; full != nil {
			maps.Copy(merged, full.raw)
		}
		maps.Copy(merged, old.raw)
		old.raw, full = merged, old
	}
	beside, _ := r.raw["rope_parameters"].(map[string]any)
	for _, t := range []*reader{full, local} {
		if t != nil {
			t.raw = maps.Clone(t.raw)
			inheritTruncate(t.raw, beside)
		}
	}
	return name, full, local
}

// inheritTruncate sets truncate of a table without it to the one beside the tables.
func inheritTruncate(table, beside map[string]any) {
	if isYarn(table) && table["truncate"] == nil && beside["truncate"] != nil {
		table["truncate"] = beside["truncate"]
	}
}

// isYarn reports whether a table of RoPE's parameters is of type yarn.
func isYarn(table map[string]any) bool {
	return table["rope_type"] == "yarn" || table["rope_type"] == nil && table["type"] == "yarn"
}

// rotaryShare returns the default of partial_rotary_factor.
func (c *Config) rotaryShare() float64 {
	if c.family.rotaryShare == 0 {
		return 1
	}
	return c.family.rotaryShare
}

// setRope puts the family's default table of RoPE's parameters into the fields of a config.json
// without one, so that overrides and Save find it there. As in transformers, an empty
// rope_parameters is a table, and an empty rope_scaling is none.
func (f *family) setRope(raw map[string]any) {
	old, isTable := raw["rope_scaling"].(map[string]any)
	scaled := raw["rope_scaling"] != nil && (!isTable || len(old) > 0)
	if f.rope != nil && !scaled && raw["rope_parameters"] == nil {
		raw["rope_parameters"] = maps.Clone(f.rope)
	}
}

// ropeTable returns the table with RoPE's parameters, and its name. As in transformers, a
// rope_scaling that is not empty replaces rope_parameters.
func ropeTable(r *reader) (string, *reader) {
	name, t := "rope_parameters", r.table("rope_parameters")
	if old := r.table("rope_scaling"); old != nil && len(old.raw) > 0 {
		name, t = "rope_scaling", old
	}
	return name, t
}

// readRopeTable reads a table of parameters, which may be nil. It also returns its
// partial_rotary_factor. theta and share are values for fields that it does not have.
func (c *Config) readRopeTable(r *reader, name string, t *reader, theta, share float64) (Rope, float64) {
	rope := Rope{Type: "default", Theta: theta, Factor: 1}
	if t == nil {
		return rope, share
	}
	defer r.adopt(name, t)
	// As in transformers, null is the default of these; that of factor is the ratio of the lengths.
	t.accepts("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "truncate", "type")
	rope.Theta = t.positive("rope_theta", theta)
	if rope.Type = t.text("rope_type", t.text("type", "default")); rope.Type != "proportional" {
		c.acceptNullShare(t)
	}
	share = t.number("partial_rotary_factor", share)
	for _, known := range []string{"mrope_section", "mrope_interleaved"} {
		t.value(known)
	}
	most := float64(c.MaxPositionEmbeddings)
	original := func() {
		n := t.extent(originalLength, c.MaxPositionEmbeddings, maxPositions)
		if c.family.localTheta == 0 && r.has(originalLength) { // transformers prefers it, as Phi-3 needs
			inTable := n
			n = r.extent(originalLength, c.MaxPositionEmbeddings, maxPositions)
			if t.has(originalLength) && inTable != n {
				c.warnings = append(c.warnings,
					fmt.Sprintf(
						"%s: %s.%s = %d has no effect, because the length outside of the table is %d, as in transformers; set %s to one of them in both places",
						r.where, name, originalLength, inTable, n, originalLength))
			}
		}
		rope.OriginalMaxPositionEmbeddings = float64(n)
	}
	switch rope.Type {
	case "default":
	case "linear":
		rope.Factor = t.required("factor")
	case "dynamic":
		rope.Factor = t.required("factor")
		rope.OriginalMaxPositionEmbeddings = most
	case "yarn":
		original()
		c.readYarn(t, &rope)
	case "longrope", "su": // su is the name in the first files of Phi-3
		rope.Type = "longrope"
		original()
		c.readLongRope(t, &rope)
	case "llama3":
		rope.Factor = t.required("factor")
		rope.LowFreqFactor = t.required("low_freq_factor")
		rope.HighFreqFactor = t.required("high_freq_factor")
		original()
		if t.has("low_freq_factor") && t.has("high_freq_factor") && rope.HighFreqFactor <= rope.LowFreqFactor {
			t.fault(status.InvalidConfig, "high_freq_factor = %v must be above low_freq_factor = %v",
				rope.HighFreqFactor, rope.LowFreqFactor)
		}
	case "proportional":
		rope.Factor = t.positive("factor", 1)
	default:
		t.fault(status.Unsupported, "rope_type = %q is not built: %s", rope.Type, notbuilt.RoPETypes.Instead)
		return rope, share
	}
	if c.family.queryGain {
		readQueryGain(t, &rope)
	}
	if c.IsLatent() && rope.Type != "default" {
		if all := t.number("mscale_all_dim", 0); all != 0 {
			rope.ScoreGain = math.Pow(rope.gain(all), 2)
		}
	}
	if r.strict {
		for _, field := range scalingFields {
			if t.raw[field] != nil && !t.seen[field] {
				t.fault(status.InvalidConfig, "%s has no effect with rope_type = %q; remove it or set rope_type", field,
					rope.Type)
				t.unknowns, t.seen[field] = append(t.unknowns, t.faults[len(t.faults)-1]), true
			}
		}
		t.unknown()
	}
	return rope, share
}

// scalingFields are the fields of RoPE's table that not all types have.
var scalingFields = []string{"factor", originalLength, "attention_factor", "beta_fast", "beta_slow", "mscale",
	"mscale_all_dim",
	"truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}

// yarnFields are the fields of YaRN besides its factor and original length.
var yarnFields = []string{"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}

func (c *Config) readYarn(t *reader, rope *Rope) {
	extended := float64(c.MaxPositionEmbeddings) / rope.OriginalMaxPositionEmbeddings
	if _, given := t.raw["factor"]; given {
		rope.Factor = t.positive("factor", extended)
	} else {
		rope.Factor = t.required("factor")
	}
	orDefault := func(name string, def float64) float64 { // null and 0 are the default
		if x := t.number(name, 0); x != 0 {
			return t.positive(name, def)
		}
		return def
	}
	rope.BetaFast, rope.BetaSlow = orDefault("beta_fast", 32), orDefault("beta_slow", 1)
	rope.Exact = !t.flag("truncate", true)
	m, all := t.number("mscale", 0), t.number("mscale_all_dim", 0)
	def := rope.gain(1)
	if m != 0 && all != 0 {
		def = rope.gain(m) / rope.gain(all)
	}
	rope.Scale = t.positive("attention_factor", def)
}

// readQueryGain reads the gain of queries. As in transformers, its growth has no default, and its
// length is the original length of RoPE's scaling, which types without one need for the gain.
func readQueryGain(t *reader, rope *Rope) {
	if !t.has(queryBeta) {
		t.fault(status.InvalidConfig, "%s is missing: give the number of the model, 0.1 in published ones, or 0 for no gain",
			queryBeta)
		return
	}
	if rope.QueryBeta = t.number(queryBeta, 0); math.IsInf(rope.QueryBeta, 0) {
		t.fault(status.InvalidConfig, "%s = %v: give a finite number", queryBeta, rope.QueryBeta)
	}
	switch rope.Type {
	case "yarn", "longrope", "llama3":
		rope.QueryLength = int64(rope.OriginalMaxPositionEmbeddings)
	default:
		rope.QueryLength = t.extent(originalLength, 0, maxPositions)
	}
}

// gain returns YaRN's factor of attention for a value of mscale.
func (r *Rope) gain(mscale float64) float64 {
	if r.Factor <= 1 {
		return 1
	}
	return 0.1*mscale*math.Log(r.Factor) + 1
}

// warnTruncate adds a warning for a truncate in the table of one kind of layer. transformers reads
// truncate beside these tables alone, so it may compute another ramp.
func (c *Config) warnTruncate(r *reader, name string, rope *Rope) {
	beside, _ := r.raw["rope_parameters"].(map[string]any)
	if there := beside["truncate"] != false; rope.Type == "yarn" && rope.Exact == there {
		c.warnings = append(c.warnings,
			fmt.Sprintf(
				"%s: %s.truncate = %t has no effect in transformers, which reads truncate in rope_parameters beside the tables; write truncate = %[3]t there for equal results",
				r.where, name, !rope.Exact))
	}
}

func (c *Config) readLongRope(t *reader, rope *Rope) {
	most, original := float64(c.MaxPositionEmbeddings), rope.OriginalMaxPositionEmbeddings
	rope.Factor = t.positive("factor", most/original)
	def := 1.0
	if rope.Factor > 1 && original > 1 {
		def = math.Sqrt(1 + math.Log(rope.Factor)/math.Log(original))
	}
	rope.Scale = t.positive("attention_factor", def)
	rope.ShortFactor, rope.LongFactor = t.factors("short_factor"), t.factors("long_factor")
}

// factors reads a list of positive numbers.
func (r *reader) factors(name string) (list []float64) {
	values, ok := r.value(name).([]any)
	if !ok || len(values) == 0 {
		r.fault(status.InvalidConfig, "%s = %v: give a list with a number for each pair of features", name, r.raw[name])
	}
	for i, v := range values {
		f, ok := asFloat(v)
		if !ok || !(f > 0) || math.IsInf(f, 0) {
			r.fault(status.InvalidConfig, "%s[%d] = %v: give a number above 0", name, i, v)
			return nil
		}
		list = append(list, f)
	}
	return list
}

// checkRope checks what depends on the number of rotated features.
func (c *Config) checkRope(r *reader, name string, rope *Rope) {
	pairs := int(c.RotaryDim / 2)
	switch rope.Type {
	case "dynamic":
		if c.RotaryDim <= 2 {
			r.fault(status.InvalidConfig,
				"%s.rope_type = %q needs more than 2 rotated features of a head, not %d; increase head_dim", name,
				rope.Type, c.RotaryDim)
		}
	case "yarn":
		if rope.Theta == 1 {
			r.fault(status.InvalidConfig, "%s.rope_theta = 1: with it, all frequencies are equal; give another number",
				name)
		}
	case "longrope":
		for _, x := range []struct {
			list string
			n    int
		}{{"short_factor", len(rope.ShortFactor)}, {"long_factor", len(rope.LongFactor)}} {
			if x.n > 0 && x.n != pairs {
				r.fault(status.InvalidConfig, "%s.%s has %d numbers for %d pairs of features; give one for each pair",
					name, x.list, x.n, pairs)
			}
		}
	}
}

// required reads a positive number that has no default.
func (r *reader) required(name string) float64 {
	if !r.has(name) {
		r.fault(status.InvalidConfig, "%s is missing: give a number above 0", name)
		return 1
	}
	return r.positive(name, 1)
}
