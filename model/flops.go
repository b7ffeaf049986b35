package model

// deltaChunk is the tokens of a chunk that the gated delta rule's arithmetic is counted with, whatever a device takes.
const deltaChunk = 64

// Flops is the model's arithmetic for one training step, forward and backward, whatever is recomputed: 6 per weight of a matrix or a
// convolution and token, and 12 per feature of a query head and pair of a query with a key it sees. pairs is Σ length²/2 over the
// documents: causal attention is counted once. Backward is twice forward everywhere.
func (c *Config) Flops(tokens int64, pairs float64) float64 {
	h, queries, keys := float64(c.HiddenSize), float64(c.NumAttentionHeads*c.HeadDim), float64(c.NumKeyValueHeads*c.HeadDim)
	full := h * (2*queries + 2*keys)
	if c.OutputGate() {
		full += h * queries
	}
	linears := float64(c.LinearLayers())
	fulls := float64(c.NumHiddenLayers) - linears
	weights := fulls*full + linears*c.linearWeights() + float64(c.NumHiddenLayers)*3*h*float64(c.IntermediateSize) + h*float64(c.VocabSize)
	return (6*weights+3*linears*c.deltaFlops())*float64(tokens) + 12*fulls*queries*pairs
}

// linearWeights is the weights of a linear layer's projections and convolution.
func (c *Config) linearWeights() float64 {
	channels, values := float64(c.convChannels()), float64(c.linearValues())
	return float64(c.HiddenSize)*(channels+2*values+2*float64(c.LinearNumValueHeads)) + channels*float64(c.LinearConvKernelDim)
}

// deltaFlops is the rule's arithmetic for one token, forward: products with the state, and within a chunk.
func (c *Config) deltaFlops() float64 {
	k, v := float64(c.LinearKeyHeadDim), float64(c.LinearValueHeadDim)
	return float64(c.LinearNumValueHeads) * (6*k*v + 2*deltaChunk*(3*k+2*v))
}
