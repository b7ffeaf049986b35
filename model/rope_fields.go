package model

import (
	"fmt"
	"maps"
)

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
		if c.Rope.Type == "proportional" {
			share = asFloats(c.Rope.Share)
		}
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
	f["rope_parameters"] = bothTables(full, local)
	if field != "" {
		f[field] = local["rope_theta"]
	}
	c.Rope.oldFields(f, full)
}

// localParameters returns copies of the tables of full and of sliding attention in a config.json.
func localParameters(f map[string]any) (full, local map[string]any) {
	full, local = map[string]any{}, map[string]any{}
	both, _ := f["rope_parameters"].(map[string]any)
	for kind, table := range map[string]map[string]any{fullAttention: full, slidingAttention: local} {
		given, _ := both[kind].(map[string]any)
		maps.Copy(table, given)
	}
	old, _ := f["rope_scaling"].(map[string]any)
	maps.Copy(full, old)
	inheritTruncate(full, both)
	inheritTruncate(local, both)
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
	if !r.Exact {
		delete(table, "truncate") // it is the default
	}
	switch r.Type {
	case "yarn", "longrope", "llama3":
		table[originalLength] = int64(r.OriginalMaxPositionEmbeddings)
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
var ropeNames = []string{"rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rope_scaling",
	"rope_parameters"}

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
		if table = maps.Clone(t); t[originalLength] != nil && raw[originalLength] != nil {
			raw[originalLength] = t[originalLength] // the one that is read
		}
		for field, value := range kept {
			if table[field] == nil {
				table[field] = value
			}
		}
	}
	if len(table) == 0 {
		into = "rope_parameters" // an empty rope_scaling is no table, see setRope
	}
	raw[into] = table
}

// YarnFields returns the fields of the model's YaRN besides type, factor and original length, and
// of a gain of queries, as in TOML with a comma before each. A table with another factor needs
// them, because a job's table replaces the whole table of the model.
func (c *Config) YarnFields() (text string) {
	var table map[string]any
	if c.family.localTheta > 0 {
		table, _ = localParameters(c.raw)
	} else if _, t := ropeTable(&reader{raw: c.raw, seen: map[string]bool{}}); t != nil {
		table = t.raw
	}
	names := yarnFields
	if c.family.queryGain {
		names = append(names[:len(names):len(names)], queryBeta)
	}
	for _, name := range names {
		if x := table[name]; x != nil {
			text += fmt.Sprintf(", %s = %v", name, x)
		}
	}
	return text
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
			by, ok := both[kind].(map[string]any)
			if ok {
				replace(table, by)
			}
			if both["truncate"] != nil && by["truncate"] == nil {
				delete(table, "truncate")
				inheritTruncate(table, both)
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
	raw["rope_parameters"] = bothTables(full, local)
}

// bothTables returns rope_parameters with the tables of full and of sliding attention. If one has
// truncate = false, transformers needs it beside the tables; a table with another one then names
// its own.
func bothTables(full, local map[string]any) map[string]any {
	both := map[string]any{fullAttention: full, slidingAttention: local}
	exact := func(table map[string]any) bool { return isYarn(table) && table["truncate"] == false }
	if !exact(full) && !exact(local) {
		return both
	}
	both["truncate"] = false
	for _, table := range []map[string]any{full, local} {
		if isYarn(table) && !exact(table) {
			table["truncate"] = true
		}
	}
	return both
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
			t[originalLength] = int64(c.Rope.OriginalMaxPositionEmbeddings)
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
