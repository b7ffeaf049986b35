package model

import (
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
	fullAttention   = "full_attention"
	linearAttention = "linear_attention"
)

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

func readHybrid(c *Config, r *reader) {
	c.LinearNumKeyHeads = r.extent("linear_num_key_heads", 16, 1<<16)
	c.LinearNumValueHeads = r.extent("linear_num_value_heads", 32, 1<<16)
	c.LinearKeyHeadDim = r.extent("linear_key_head_dim", 128, 1<<16)
	c.LinearValueHeadDim = r.extent("linear_value_head_dim", 128, 1<<16)
	c.LinearConvKernelDim = r.extent("linear_conv_kernel_dim", 4, 1<<10)
	if c.LinearNumValueHeads%c.LinearNumKeyHeads != 0 {
		r.fault(status.InvalidConfig,
			"linear_num_value_heads = %d is not a multiple of linear_num_key_heads = %d: correct one of them",
			c.LinearNumValueHeads, c.LinearNumKeyHeads)
	}
	r.accepts("attn_output_gate") // transformers ignores it
	if !r.flag("attn_output_gate", true) {
		r.fault(status.Unsupported, "attn_output_gate = false is not built for %s: %s", c.ModelType,
			notbuilt.OutputGates.Instead)
	}
}

func writeHybrid(c *Config, f fields) {
	f.put("linear_num_key_heads", c.LinearNumKeyHeads)
	f.put("linear_num_value_heads", c.LinearNumValueHeads)
	f.put("linear_key_head_dim", c.LinearKeyHeadDim)
	f.put("linear_value_head_dim", c.LinearValueHeadDim)
	f.put("linear_conv_kernel_dim", c.LinearConvKernelDim)
}
