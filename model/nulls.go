package model

import (
	"slices"

	"ulysses/internal/status"
)

// A field that is null in a config.json is not a missing field: transformers refuses most nulls,
// and takes some for another value than the default. TOML has no null.

// nullable has the families in which a field may be null. The number of heads of keys, and the size
// of heads, are num_attention_heads, and hidden_size / num_attention_heads then; the other fields
// are ignored.
var nullable = map[string][]string{
	"head_dim": {"ernie4_5", "llama", "mistral", "mixtral", "seed_oss"},
	"num_key_value_heads": {"deepseek_v2", "deepseek_v3", "ernie4_5", "granite", "llama", "olmo2", "olmo3", "olmoe",
		"phi3", "qwen2", "qwen3", "seed_oss", "smollm3"},
	"norm_topk_prob": {"deepseek_v2"},
}

// acceptNulls accepts nulls of the fields of nullable.
func (c *Config) acceptNulls(r *reader) {
	for name, families := range nullable {
		if slices.Contains(families, c.ModelType) {
			r.accepts(name)
		}
	}
}

// accepts says that null is no fault in the fields.
func (r *reader) accepts(names ...string) {
	if r.optional == nil {
		r.optional = map[string]bool{}
	}
	for _, name := range names {
		r.optional[name] = true
	}
}

// isNull reports whether the file says that a field is null.
func (r *reader) isNull(name string) bool {
	v, given := r.raw[name]
	return given && v == nil
}

// missing reports whether a field has no value. A null is a fault, unless the field accepts it:
// transformers refuses it, or does not take it for the default.
func (r *reader) missing(name string) bool {
	if r.isNull(name) && !r.optional[name] {
		r.fault(status.InvalidConfig, "%s = null: give a value, or remove the field to have its default", name)
		r.accepts(name) // one fault is enough
	}
	return !r.has(name)
}
