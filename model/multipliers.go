package model

import (
	"math"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// Granite multiplies constants into the activations (IBM 2024, Granite 3.0 Language Models):
// embeddings, the outputs of sublayers and the scores of attention by one each, and it divides the
// logits by logits_scaling.
func readGranite(c *Config, r *reader) {
	c.EmbeddingScale = r.multiplier("embedding_multiplier")
	c.ResidualScale = r.multiplier("residual_multiplier")
	c.ScoreScale = r.multiplier("attention_multiplier")
	c.LogitsScale = 1 / r.multiplier("logits_scaling")
}

// multiplier reads a constant; 1 if it is missing.
func (r *reader) multiplier(name string) float64 {
	x := r.number(name, 1)
	if !(math.Abs(x) > 1e-30 && math.Abs(x) < 1e30) {
		r.fault(status.InvalidConfig, "%s = %v: give a number other than 0", name, x)
		return 1
	}
	return x
}

// readPhi3 reads the fields of Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219 and
// 2412.08905). embd_pdrop has no effect in transformers either. The name yarn was used for
// longrope. transformers reads the original length outside of the table alone, and has a default
// for it.
func readPhi3(_ *Config, r *reader) {
	r.ineffective("embd_pdrop", "remove it")
	for _, name := range []string{"rope_parameters", "rope_scaling"} {
		table, _ := r.raw[name].(map[string]any)
		for _, field := range []string{"rope_type", "type"} {
			switch kind := table[field]; kind {
			case nil, "default", "longrope", "su":
			case "yarn":
				table[field] = "longrope"
			default:
				r.fault(status.Unsupported, "%s.%s = %v is not built for phi3: %s", name, field, kind,
					notbuilt.PhiRoPE.Instead)
			}
		}
	}
	if !r.strict && r.missing(originalLength) {
		r.raw[originalLength] = int64(4096)
	}
}

// readSeedOss reads the fields of Seed-OSS (ByteDance 2025).
func readSeedOss(_ *Config, r *reader) {
	if r.flag("attention_out_bias", false) {
		r.fault(status.Unsupported, "attention_out_bias = true is not built: %s", notbuilt.Biases.Instead)
	}
}

// writePhi3 writes the original length where transformers reads it.
func writePhi3(c *Config, f fields) {
	if c.Rope.Type == "longrope" {
		f.put(originalLength, int64(c.Rope.OriginalMaxPositionEmbeddings))
	}
}

// readSmolLM3 reads the layers without RoPE (Hugging Face 2025, SmolLM3; Kazemnejad et al. 2023,
// arXiv:2305.19466): no_rope_layers has a 1 for each layer with RoPE, and without it every
// no_rope_layer_interval-th layer has none.
func readSmolLM3(c *Config, r *reader) {
	interval := r.extent("no_rope_layer_interval", 4, maxLayers)
	list, given := r.value("no_rope_layers").([]any)
	if !given && r.has("no_rope_layers") {
		r.fault(status.InvalidConfig,
			"no_rope_layers = %v: give a list with 1 for each layer with RoPE, and 0 for the others",
			r.raw["no_rope_layers"])
	}
	if given && int64(len(list)) != c.NumHiddenLayers {
		r.fault(status.InvalidConfig, "no_rope_layers has %d entries, num_hidden_layers is %d: make them agree",
			len(list), c.NumHiddenLayers)
		return
	}
	c.NoRope = make([]bool, c.NumHiddenLayers)
	for i := range c.NoRope {
		if c.NoRope[i] = interval > 0 && (int64(i)+1)%interval == 0; !given {
			continue
		}
		n, ok := asInt(list[i])
		if !ok || n != 0 && n != 1 {
			r.fault(status.InvalidConfig, "no_rope_layers[%d] = %v: give 1 for a layer with RoPE, or 0", i, list[i])
			return
		}
		c.NoRope[i] = n == 0
	}
}

// unrotatedSlide is the rule of SmolLM3: layers without RoPE slide if there is a window.
func unrotatedSlide(r *reader, window int64) func(int64) string {
	quiet := &reader{raw: r.raw, seen: map[string]bool{}} // r has the faults of these fields already
	own := Config{NumHiddenLayers: quiet.extent("num_hidden_layers", 0, maxLayers)}
	readSmolLM3(&own, quiet)
	return func(layer int64) string {
		return slidingIf(window > 0 && layer < int64(len(own.NoRope)) && own.NoRope[layer])
	}
}
