package model

import "fmt"

// Warnings returns a line for each field of the config.json that the model does not read as the
// file's author may have expected.
func (c *Config) Warnings() []string { return c.warnings }

// warnThetas adds a warning for each theta outside of RoPE's tables that has no effect, because a
// table has another one, as in transformers. full is the table of full attention, or of all layers,
// and local the one of layers with a window; either may be nil.
//
// In OLMo 3, rope_theta was for all layers in transformers 4. Transformers 5 reads it for full
// attention alone, and layers with a window have the family's theta unless their table has one.
func (c *Config) warnThetas(r *reader, full, local *reader) {
	shadowed := func(field, tables string, t *reader, used float64) {
		if t == nil || !r.has(field) || !t.has("rope_theta") {
			return
		}
		if x, ok := asFloat(r.raw[field]); ok && x != used {
			c.warnings = append(c.warnings,
				fmt.Sprintf("%s: %s = %v has no effect, because %s rope_theta = %v; remove one of them", r.where,
					field, x, tables, used))
		}
	}
	shadowed("rope_theta", "the table of RoPE's parameters has", full, c.Rope.Theta)
	if c.LocalRope == nil {
		return
	}
	sliding := "rope_parameters." + slidingAttention
	if field := c.family.localField; field != "" {
		shadowed(field, sliding+" has", local, c.LocalRope.Theta)
		return
	}
	x, ok := asFloat(r.raw["rope_theta"])
	if ok && x != c.LocalRope.Theta && (local == nil || !local.has("rope_theta")) {
		c.warnings = append(c.warnings,
			fmt.Sprintf(
				"%s: rope_theta = %v is not for layers with a window, which have %v, as in transformers 5; transformers 4 used it for all layers; set rope_theta in %s to one of them",
				r.where, x, c.LocalRope.Theta, sliding))
	}
}
