package model

// Flops is the model's arithmetic for one training step, forward and backward, whatever is recomputed: 6 per weight of a matrix and
// token, and 12 per feature of a query head and pair of a query with a key it sees. pairs is Σ length²/2 over the documents: causal
// attention is counted once.
func (c *Config) Flops(tokens int64, pairs float64) float64 {
	h, d := c.HiddenSize, c.HeadDim
	attention := h*d*(2*c.NumAttentionHeads+2*c.NumKeyValueHeads) + 3*h*c.IntermediateSize
	matrices := float64(c.NumHiddenLayers*attention + h*c.VocabSize)
	return 6*matrices*float64(tokens) + 12*float64(c.NumHiddenLayers*c.NumAttentionHeads*d)*pairs
}
