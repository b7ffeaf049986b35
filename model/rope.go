package model

import (
	"fmt"
	"maps"
	"math"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

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
	Share float64 // proportional: of the features, that are rotated
}

// Switches reports whether the frequencies depend on the longest document of the batch.
func (r *Rope) Switches() bool { return r.Type == "dynamic" || r.Type == "longrope" }

// Switches reports whether RoPE's frequencies depend on the longest document of the batch. Then a
// pass needs Batch.Length.
func (c *Config) Switches() bool {
	return c.Rope.Switches() || c.LocalRope != nil && c.LocalRope.Switches()
}

// readRope reads rope_parameters (transformers 5), or rope_theta with rope_scaling (transformers
// 4), and how many features of a head are rotated. The sections of multimodal positions are
// ignored: in text, time, height and width are equal.
func (c *Config) readRope(r *reader) {
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
		rope := c.readRopeTable(r, "rope_parameters."+slidingAttention, local, own, &share)
		c.LocalRope = &rope
	} else if t != nil && (t.raw[fullAttention] != nil || t.raw[slidingAttention] != nil) {
		r.fault(status.Unsupported, "%s has a table for each kind of layer, which is not built for %s: %s", name, c.ModelType, notbuilt.LayerRoPE.Instead)
		return
	}
	c.Rope = c.readRopeTable(r, name, t, theta, &share)
	c.warnThetas(r, t, local)
	c.RotaryDim = int64(float64(c.HeadDim) * share)
	switch {
	case c.Rope.Type == "proportional":
		c.RotaryDim = c.HeadDim
		if c.Rope.Share = share; !(share >= 0 && share <= 1) {
			r.fault(status.InvalidConfig, "partial_rotary_factor = %v: give a number from 0 to 1", share)
		}
	case c.family.rotaryShare == 0:
		if share != 1 {
			r.fault(status.Unsupported, "partial_rotary_factor = %v is not built for %s: %s", share, c.ModelType, notbuilt.PartialRotary.Instead)
		}
	case c.HeadDim%2 != 0: // readHeads has reported it
	case !(share > 0 && share <= 1) || c.RotaryDim < 2 || c.RotaryDim%2 != 0:
		r.fault(status.InvalidConfig, "partial_rotary_factor = %v of head_dim = %d is %d features; set it so that an even number of at least 2 features is rotated",
			share, c.HeadDim, c.RotaryDim)
	}
	c.checkRope(r, name, &c.Rope)
	if c.LocalRope != nil {
		c.checkRope(r, "rope_parameters."+slidingAttention, c.LocalRope)
	}
}

// localTables returns the tables of RoPE's parameters of full attention, with its name, and of
// sliding attention, which may be nil. As in transformers, a rope_scaling changes fields of full
// attention only, and a table that is null is the same as a missing one.
func localTables(r *reader) (name string, full, local *reader) {
	name = "rope_parameters." + fullAttention
	if both := r.table("rope_parameters"); both != nil {
		full, local = both.table(fullAttention), both.table(slidingAttention)
		if both.raw["rope_type"] != nil || both.raw["rope_theta"] != nil {
			both.fault(status.InvalidConfig, "rope_type and rope_theta belong into the tables %s and %s", fullAttention, slidingAttention)
		} else if r.strict {
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
	return name, full, local
}

// rotaryShare returns the default of partial_rotary_factor.
func (c *Config) rotaryShare() float64 {
	if c.family.rotaryShare == 0 {
		return 1
	}
	return c.family.rotaryShare
}

// setRope puts the family's default table of RoPE's parameters into the fields of a config.json
// without one, so that overrides and Save find it there.
func (f *family) setRope(raw map[string]any) {
	for _, name := range []string{"rope_parameters", "rope_scaling"} {
		if t, given := raw[name].(map[string]any); raw[name] != nil && (!given || len(t) > 0) {
			return
		}
	}
	if f.rope != nil {
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

// readRopeTable reads a table of parameters, which may be nil.
func (c *Config) readRopeTable(r *reader, name string, t *reader, theta float64, share *float64) Rope {
	rope := Rope{Type: "default", Theta: theta, Factor: 1}
	if t == nil {
		return rope
	}
	defer r.adopt(name, t)
	rope.Theta = t.positive("rope_theta", theta)
	rope.Type = t.text("rope_type", t.text("type", "default"))
	*share = t.number("partial_rotary_factor", *share)
	for _, known := range []string{"mrope_section", "mrope_interleaved"} {
		t.value(known)
	}
	most := float64(c.MaxPositionEmbeddings)
	original := func() {
		const field = "original_max_position_embeddings"
		n := t.extent(field, c.MaxPositionEmbeddings, maxPositions)
		if c.family.localTheta == 0 && r.has(field) { // transformers prefers it, as Phi-3 needs
			n = r.extent(field, c.MaxPositionEmbeddings, maxPositions)
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
			t.fault(status.InvalidConfig, "high_freq_factor = %v must be above low_freq_factor = %v", rope.HighFreqFactor, rope.LowFreqFactor)
		}
	case "proportional":
		rope.Factor = t.positive("factor", 1)
	default:
		t.fault(status.Unsupported, "rope_type = %q is not built: %s", rope.Type, notbuilt.RoPETypes.Instead)
		return rope
	}
	if r.strict {
		for _, field := range scalingFields {
			if t.raw[field] != nil && !t.seen[field] {
				t.fault(status.InvalidConfig, "%s has no effect with rope_type = %q; remove it or set rope_type", field, rope.Type)
				t.unknowns, t.seen[field] = append(t.unknowns, t.faults[len(t.faults)-1]), true
			}
		}
		t.unknown()
	}
	return rope
}

// scalingFields are the fields of RoPE's table that not all types have.
var scalingFields = []string{"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
	"truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}

func (c *Config) readYarn(t *reader, rope *Rope) {
	extended := float64(c.MaxPositionEmbeddings) / rope.OriginalMaxPositionEmbeddings
	if _, given := t.raw["factor"]; given {
		rope.Factor = t.positive("factor", extended) // null means the ratio of the lengths
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
	gain := func(m float64) float64 {
		if rope.Factor <= 1 {
			return 1
		}
		return 0.1*m*math.Log(rope.Factor) + 1
	}
	m, all := t.number("mscale", 0), t.number("mscale_all_dim", 0)
	def := gain(1)
	if m != 0 && all != 0 {
		def = gain(m) / gain(all)
	}
	rope.Scale = t.positive("attention_factor", def)
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
	if !ok {
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
			r.fault(status.InvalidConfig, "%s.rope_type = %q needs more than 2 rotated features of a head, not %d; increase head_dim", name, rope.Type, c.RotaryDim)
		}
	case "yarn":
		if rope.Theta == 1 {
			r.fault(status.InvalidConfig, "%s.rope_theta = 1: with it, all frequencies are equal; give another number", name)
		}
	case "longrope":
		for _, x := range []struct {
			list string
			n    int
		}{{"short_factor", len(rope.ShortFactor)}, {"long_factor", len(rope.LongFactor)}} {
			if x.n > 0 && x.n != pairs {
				r.fault(status.InvalidConfig, "%s.%s has %d numbers for %d pairs of features; give one for each pair", name, x.list, x.n, pairs)
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
// between them.
func (r *Rope) llama3(f float32) float32 {
	length := float32(r.OriginalMaxPositionEmbeddings)
	wave := float32(2*math.Pi) / f
	low, high := float32(r.OriginalMaxPositionEmbeddings/r.LowFreqFactor), float32(r.OriginalMaxPositionEmbeddings/r.HighFreqFactor)
	switch {
	case wave > low:
		return f / float32(r.Factor)
	case wave < high:
		return f
	}
	smooth := (length/wave - float32(r.LowFreqFactor)) / float32(r.HighFreqFactor-r.LowFreqFactor)
	return (1-smooth)*f/float32(r.Factor) + smooth*f
}

// ropeFields sets RoPE's fields of a config.json, for transformers 4 (rope_theta and rope_scaling)
// and for transformers 5 (rope_parameters). They agree, because transformers 5 reads a rope_scaling
// before rope_parameters.
func (c *Config) ropeFields(f map[string]any) {
	if c.LocalRope != nil {
		c.localRopeFields(f)
		return
	}
	name, table := "rope_parameters", map[string]any{}
	if old, _ := f["rope_scaling"].(map[string]any); len(old) > 0 {
		name = "rope_scaling"
	}
	if given, ok := f[name].(map[string]any); ok {
		table = maps.Clone(given)
	}
	c.Rope.complete(table, f["rope_theta"])
	if c.family.rotaryShare > 0 {
		share := asFloats(float64(c.RotaryDim) / float64(c.HeadDim))
		if f["partial_rotary_factor"] != nil {
			share = f["partial_rotary_factor"]
		}
		if table["partial_rotary_factor"] == nil {
			table["partial_rotary_factor"] = share
		}
	}
	f["rope_parameters"] = table
	if c.family.rotaryShare > 0 && (c.family.rotaryShare < 1 || c.RotaryDim < c.HeadDim) {
		f["partial_rotary_factor"] = table["partial_rotary_factor"]
	}
	c.Rope.oldFields(f, table)
}

// localRopeFields is ropeFields of families in which sliding layers have a RoPE of their own.
func (c *Config) localRopeFields(f map[string]any) {
	full, local := localParameters(f)
	c.Rope.complete(full, f["rope_theta"])
	field := c.family.localField
	c.LocalRope.complete(local, f[field])
	f["rope_parameters"] = map[string]any{fullAttention: full, slidingAttention: local}
	if field != "" {
		f[field] = local["rope_theta"]
	}
	c.Rope.oldFields(f, full)
}

// localParameters returns copies of the tables of full and of sliding attention in a config.json.
func localParameters(f map[string]any) (full, local map[string]any) {
	full, local = map[string]any{}, map[string]any{}
	if both, ok := f["rope_parameters"].(map[string]any); ok {
		for kind, table := range map[string]map[string]any{fullAttention: full, slidingAttention: local} {
			given, _ := both[kind].(map[string]any)
			maps.Copy(table, given)
		}
	}
	old, _ := f["rope_scaling"].(map[string]any)
	maps.Copy(full, old)
	return full, local
}

// complete sets the fields of a table that transformers needs. theta is the file's own value
// outside of the table, or nil.
func (r *Rope) complete(table map[string]any, theta any) {
	if table["rope_theta"] == nil {
		if table["rope_theta"] = theta; theta == nil {
			table["rope_theta"] = asFloats(r.Theta)
		}
	}
	delete(table, "type")
	table["rope_type"] = r.Type
	switch r.Type {
	case "yarn", "longrope", "llama3":
		table["original_max_position_embeddings"] = int64(r.OriginalMaxPositionEmbeddings)
	}
}

// oldFields sets the fields of transformers 4 from the table of transformers 5.
func (r *Rope) oldFields(f, table map[string]any) {
	f["rope_theta"], f["rope_scaling"] = table["rope_theta"], nil
	if r.Type != "default" {
		scaling := maps.Clone(table)
		delete(scaling, "rope_theta")
		f["rope_scaling"] = scaling
	}
}

// ropeNames are the fields of a config.json with RoPE's parameters.
var ropeNames = []string{"rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rope_scaling", "rope_parameters"}

// overrideRope replaces RoPE's fields of a config.json. The file may have a parameter in several
// places; the result has it in one.
func overrideRope(raw, fields map[string]any) {
	touched := false
	for _, name := range ropeNames {
		_, given := fields[name]
		touched = touched || given
	}
	if !touched {
		return
	}
	if f := families[fmt.Sprint(raw["model_type"])]; f != nil && f.localTheta > 0 {
		overrideLocalRope(raw, fields)
		return
	}
	table := map[string]any{}
	for _, name := range []string{"rope_parameters", "rope_scaling"} {
		if t, ok := raw[name].(map[string]any); ok && len(t) > 0 {
			table = maps.Clone(t)
		}
		delete(raw, name)
	}
	kept := map[string]any{}
	for _, name := range []string{"rope_theta", "partial_rotary_factor"} {
		if table[name] == nil && raw[name] != nil {
			table[name] = raw[name]
		}
		delete(raw, name)
		if value, ok := fields[name]; ok {
			table[name] = value
		}
		if table[name] != nil {
			kept[name] = table[name]
		}
	}
	into := "rope_parameters"
	for _, name := range []string{"rope_parameters", "rope_scaling"} {
		value, given := fields[name]
		if !given {
			continue
		}
		t, ok := value.(map[string]any)
		if into = name; !ok { // a fault, or null: no scaling
			raw[name] = value
			maps.Copy(raw, kept)
			return
		}
		if table = maps.Clone(t); t["original_max_position_embeddings"] != nil {
			delete(raw, "original_max_position_embeddings") // which would replace the table's
		}
		for field, value := range kept {
			if table[field] == nil {
				table[field] = value
			}
		}
	}
	raw[into] = table
}

// overrideLocalRope is overrideRope for families in which sliding layers have a RoPE of their own.
// rope_theta and rope_scaling are for full attention.
func overrideLocalRope(raw, given map[string]any) {
	full, local := localParameters(raw)
	thetas := map[string]map[string]any{"rope_theta": full, "rope_local_base_freq": local}
	for name, table := range thetas {
		if table["rope_theta"] == nil && raw[name] != nil {
			table["rope_theta"] = raw[name]
		}
		delete(raw, name)
	}
	delete(raw, "rope_scaling")
	replace := func(table, by map[string]any) {
		theta := table["rope_theta"]
		clear(table)
		if theta != nil {
			table["rope_theta"] = theta
		}
		maps.Copy(table, by)
	}
	if value, ok := given["rope_parameters"]; ok {
		both, isTable := value.(map[string]any)
		if !isTable || both["rope_type"] != nil || both["rope_theta"] != nil { // a fault
			raw["rope_parameters"] = value
			return
		}
		for kind, table := range map[string]map[string]any{fullAttention: full, slidingAttention: local} {
			if by, ok := both[kind].(map[string]any); ok {
				replace(table, by)
			}
		}
	}
	if value, ok := given["rope_scaling"]; ok {
		by, isTable := value.(map[string]any)
		if !isTable && value != nil { // a fault
			raw["rope_scaling"] = value
		}
		replace(full, by)
	}
	for name, table := range thetas {
		if value, ok := given[name]; ok {
			table["rope_theta"] = value
		}
	}
	if value, ok := given["partial_rotary_factor"]; ok {
		raw["partial_rotary_factor"] = value // refused, unless it is 1
	}
	raw["rope_parameters"] = map[string]any{fullAttention: full, slidingAttention: local}
}

// extend sets max_position_embeddings to the positions that an override of RoPE's scaling adds, so
// that the saved config.json has the new length. Only types whose frequencies do not depend on that
// field are extended.
func (c *Config) extend(fields map[string]any) {
	if fields["max_position_embeddings"] != nil || fields["rope_scaling"] == nil && fields["rope_parameters"] == nil {
		return
	}
	if c.Rope.Type == "yarn" || c.Rope.Type == "llama3" {
		if n := c.Positions(); n > c.MaxPositionEmbeddings {
			c.fixOriginal()
			c.MaxPositionEmbeddings, c.raw["max_position_embeddings"] = n, n
		}
	}
}

// fixOriginal writes the original length into the tables of the configuration, because it follows
// from max_position_embeddings where it is missing.
func (c *Config) fixOriginal() {
	set := func(parent map[string]any, name string) {
		if t, ok := parent[name].(map[string]any); ok {
			t = maps.Clone(t)
			t["original_max_position_embeddings"] = int64(c.Rope.OriginalMaxPositionEmbeddings)
			parent[name] = t
		}
	}
	if c.LocalRope == nil {
		set(c.raw, "rope_parameters")
		set(c.raw, "rope_scaling")
	} else { // overrideLocalRope made a new map
		set(c.raw["rope_parameters"].(map[string]any), fullAttention)
	}
}
