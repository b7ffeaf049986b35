package model

// deltaChunk is the tokens of a chunk that the gated delta rule's arithmetic is counted with,
// whatever a device takes.
const deltaChunk = 64

// Flops is the model's arithmetic for one training step, forward and backward, whatever is
// recomputed: 6 per weight of a matrix or a convolution and token, and 12 per feature of a query
// head and pair of a query with a key it sees. pairs is Σ length²/2 over the documents: causal
// attention is counted once. Backward is twice forward everywhere.
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

// deltaFlops is the rule's arithmetic for one token, forward: products with the state, and within a
// chunk.
func (c *Config) deltaFlops() float64 {
	k, v := float64(c.LinearKeyHeadDim), float64(c.LinearValueHeadDim)
	return float64(c.LinearNumValueHeads) * (6*k*v + 2*deltaChunk*(3*k+2*v))
}

// RecomputeFlops is the arithmetic that a pass over so many tokens does a second or third time, by
// its activations and tiles: forward products and attention, in the terms of Flops.
func (m *Model) RecomputeFlops(tokens int64, pairs float64) float64 {
	c, a, n := m.Config, m.activations, float64(tokens)
	h, queries, keys, f := float64(c.HiddenSize), float64(c.NumAttentionHeads*c.HeadDim), float64(c.NumKeyValueHeads*c.HeadDim), float64(c.IntermediateSize)
	gate := 0.0 // of softmax attention's output
	if c.OutputGate() {
		gate = 2 * n * h * queries
	}
	values := float64(c.linearValues())
	full := mixerFlops{in: 2*n*h*(queries+2*keys) + gate, core: 4 * queries * pairs, out: 2 * n * h * queries, gate: gate}
	linear := mixerFlops{core: n * c.deltaFlops(), out: 2 * n * h * values, gate: 2 * n * h * values}
	if c.hybrid() {
		linear.in = 2*n*c.linearWeights() - linear.out
	}
	mlpUp, mlp := 4*n*h*f, 6*n*h*f

	replays := int64(len(m.visits) - len(m.blocks)) // of layers whose inputs are not kept
	sum := float64(replays) * mlp
	if m.tiles.MLP > 0 || a.MLP == Recompute {
		sum += float64(len(m.blocks)) * mlpUp
	}
	kinds := [2]struct {
		mixerFlops
		layers float64
	}{{full, float64(m.plans.fulls)}, {linear, float64(m.plans.linears)}}
	for i, k := range kinds {
		share := k.layers / float64(len(m.blocks)) // of the replays
		output := k.out
		if a.QKV == Recompute { // the gate's input is not there
			output += k.gate
		}
		switch {
		case a.Attention == Recompute:
			sum += (k.layers + share*float64(replays)) * (k.in + k.core + k.out)
		case a.MLP == Recompute: // the stream before the MLP is not there
			sum += (k.layers + share*float64(replays)) * output
		default:
			sum += share * float64(replays) * output
		}
		if a.QKV == Recompute && (a.Attention != Recompute || i == 0 && a.groups() > 1) {
			if i == 0 {
				sum += k.layers * k.in
			} else {
				sum += k.layers * k.gate
			}
		}
	}
	return sum
}

// mixerFlops is the forward arithmetic of a mixer: projections before it, itself, the projection
// behind it; gate is the part of in that the output's gate comes from.
type mixerFlops struct{ in, core, out, gate float64 }
