package model

import (
	"maps"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// Hybrid has the fields of a decoder with two kinds of layers: linear attention by the gated delta
// rule (Yang, Kautz & Hatamizadeh 2024), and typically every fourth layer softmax attention with a
// gate on its output.
type Hybrid struct {
	LinearNumKeyHeads   int64
	LinearNumValueHeads int64 // a multiple of the key heads
	LinearKeyHeadDim    int64
	LinearValueHeadDim  int64
	LinearConvKernelDim int64
}

const (
	hybridType      = "qwen3_5_text"
	fullAttention   = "full_attention"
	linearAttention = "linear_attention"
)

func (c *Config) hybrid() bool { return c.ModelType == hybridType }

// layerKinds returns the end of the error message for a kind of layer that is not built.
func (c *Config) layerKinds() string {
	switch {
	case c.hybrid():
		return notbuilt.HybridLayerTypes.Instead
	case c.windowed():
		return notbuilt.WindowLayerTypes.Instead
	}
	return notbuilt.LayerTypes.Instead
}

// Linear reports whether a layer is linear attention.
func (c *Config) Linear(layer int64) bool {
	return c.kind(layer) == linearAttention
}

// LinearLayers returns the number of layers with linear attention.
func (c *Config) LinearLayers() (n int64) {
	for i := range c.NumHiddenLayers {
		if c.Linear(i) {
			n++
		}
	}
	return n
}

// convChannels returns the number of features of q, k and v in a linear layer, the channels of its
// convolution.
func (c *Config) convChannels() int64 {
	return 2*c.LinearNumKeyHeads*c.LinearKeyHeadDim + c.linearValues()
}

// linearValues returns the number of features of v in a linear layer.
func (c *Config) linearValues() int64 { return c.LinearNumValueHeads * c.LinearValueHeadDim }

func (c *Config) readHybrid(r *reader) {
	c.LinearNumKeyHeads = r.extent("linear_num_key_heads", 16, 1<<16)
	c.LinearNumValueHeads = r.extent("linear_num_value_heads", 32, 1<<16)
	c.LinearKeyHeadDim = r.extent("linear_key_head_dim", 128, 1<<16)
	c.LinearValueHeadDim = r.extent("linear_value_head_dim", 128, 1<<16)
	c.LinearConvKernelDim = r.extent("linear_conv_kernel_dim", 4, 1<<10)
	if c.LinearNumValueHeads%c.LinearNumKeyHeads != 0 {
		r.fault(status.InvalidConfig, "linear_num_value_heads = %d is not a multiple of linear_num_key_heads = %d: correct one of them",
			c.LinearNumValueHeads, c.LinearNumKeyHeads)
	}
	if !r.flag("attn_output_gate", true) {
		r.fault(status.Unsupported, "attn_output_gate = false is not built for %s: %s", c.ModelType, notbuilt.OutputGates.Instead)
	}
	interval := r.extent("full_attention_interval", 4, maxLayers)
	kinds := c.readLayerTypes(r)
	for i := range c.NumHiddenLayers {
		kind := linearAttention
		if (i+1)%interval == 0 {
			kind = fullAttention
		}
		if i < int64(len(kinds)) {
			kind = kinds[i]
		}
		c.LayerTypes = append(c.LayerTypes, kind)
	}
}

// textOf returns the fields of the language model in a config.json of Qwen3.5 with vision:
// text_config, and fields that the file has for the whole model. It returns any other file
// unchanged.
func textOf(raw map[string]any) map[string]any {
	text, ok := raw["text_config"].(map[string]any)
	if raw["model_type"] != "qwen3_5" || !ok {
		return raw
	}
	text = maps.Clone(text)
	for _, name := range []string{"tie_word_embeddings", "quantization_config", "dtype", "torch_dtype"} {
		if raw[name] != nil {
			text[name] = raw[name]
		}
	}
	if text["model_type"] == nil {
		text["model_type"] = hybridType
	}
	return text
}

// put calls put for each field with its name in config.json.
func (h *Hybrid) put(put func(name string, value any)) {
	put("linear_num_key_heads", h.LinearNumKeyHeads)
	put("linear_num_value_heads", h.LinearNumValueHeads)
	put("linear_key_head_dim", h.LinearKeyHeadDim)
	put("linear_value_head_dim", h.LinearValueHeadDim)
	put("linear_conv_kernel_dim", h.LinearConvKernelDim)
}
