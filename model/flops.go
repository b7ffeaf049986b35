package model

// deltaChunk is the number of tokens of a chunk in the count of the gated delta rule's arithmetic.
// It does not depend on the device.
const deltaChunk = 64

// Flops returns the floating-point operations of the model in one training step, forward and
// backward, without recomputation: 6 per token and weight of a matrix or convolution, and 6 per
// pair of a query with a key and feature of a query head or of its output. pairs is the sum of
// Pairs over the documents. Backward is twice forward. Of a layer's experts, the experts of a token
// count.
func (c *Config) Flops(tokens int64, pairs float64) float64 {
	full, linears := c.softmaxFlops(1, 1), float64(c.LinearLayers()) // of one token, and of one pair
	fulls := float64(c.NumHiddenLayers) - linears
	weights := linears*c.linearWeights() + c.mlpWeights() + float64(c.HiddenSize*c.VocabSize)
	return (6*weights+3*fulls*(full.in+full.out)+3*linears*c.deltaFlops())*float64(tokens) + 3*fulls*full.core*pairs
}

// softmaxFlops returns the forward operations of a layer of softmax attention.
func (c *Config) softmaxFlops(tokens, pairs float64) (f mixerFlops) {
	h, heads := float64(c.HiddenSize), float64(c.NumAttentionHeads)
	queries, values := heads*float64(c.HeadDim), heads*float64(c.ValueDim())
	f.core, f.out = 2*(queries+values)*pairs, 2*tokens*h*values
	if c.IsLatent() {
		compress, expand := c.latentWeights()
		f.in, f.again = 2*tokens*(compress+expand), 2*tokens*expand
		return f
	}
	if c.OutputGate() {
		f.gate = 2 * tokens * h * queries
	}
	f.in = 2*tokens*h*(queries+2*float64(c.NumKeyValueHeads*c.HeadDim)) + f.gate
	f.again = f.in
	return f
}

// mlpWeights returns the number of weights of all MLPs and routers that a token uses.
func (c *Config) mlpWeights() float64 {
	gateUp, down, routers := c.mlpMatrices()
	return gateUp + down + routers
}

// mlpMatrices returns the number of weights of all MLPs that a token uses: of gate and up, of down,
// and of routers.
func (c *Config) mlpMatrices() (gateUp, down, routers float64) {
	sparse, h, e := float64(c.SparseLayers()), float64(c.HiddenSize), &c.Experts
	down = (float64(c.NumHiddenLayers)-sparse)*h*float64(c.IntermediateSize) +
		sparse*h*float64(e.Size*e.PerToken+e.Shared)
	routers = sparse * h * float64(e.Count)
	if e.Shared > 0 && c.family.experts.shared {
		routers += sparse * h // the gate of the shared expert
	}
	return 2 * down, down, routers
}

// Flops returns Config.Flops without the products for gradients of frozen matrices, and with those
// of adapters.
func (m *Model) Flops(tokens int64, pairs float64) float64 {
	work := m.Config.Flops(tokens, pairs)
	for _, g := range m.groups {
		for _, p := range g.Params {
			switch {
			case p.isAdapter():
				work += 6 * float64(p.Numel()) * float64(tokens)
			case p.expert && p.Frozen:
				share := float64(m.Config.Experts.PerToken) / float64(m.Config.Experts.Count)
				work -= 2 * share * float64(p.Numel()) * float64(tokens)
			case (p.matrix || p.bare) && p.Frozen:
				work -= 2 * float64(p.Numel()) * float64(tokens)
			}
		}
	}
	return work
}

// linearWeights returns the number of weights in a linear layer's projections and convolution.
func (c *Config) linearWeights() float64 {
	channels, values := float64(c.convChannels()), float64(c.linearValues())
	return float64(c.HiddenSize)*(channels+2*values+2*float64(c.LinearNumValueHeads)) +
		channels*float64(c.LinearConvKernelDim)
}

// deltaFlops returns the operations of the gated delta rule for one token, forward: products with
// the state, and products within a chunk.
func (c *Config) deltaFlops() float64 {
	k, v := float64(c.LinearKeyHeadDim), float64(c.LinearValueHeadDim)
	return float64(c.LinearNumValueHeads) * (6*k*v + 2*deltaChunk*(3*k+2*v))
}

// RecomputeFlops returns the operations that a pass recomputes because of its activation policies
// and tiles: matrix products and attention, counted as in Flops.
func (m *Model) RecomputeFlops(tokens int64, pairs float64) float64 {
	c, a, n := m.Config, m.activations, float64(tokens)
	h, values := float64(c.HiddenSize), float64(c.linearValues())
	full := c.softmaxFlops(n, pairs)
	linear := mixerFlops{core: n * c.deltaFlops(), out: 2 * n * h * values, gate: 2 * n * h * values}
	linear.in = 2*n*c.linearWeights() - linear.out
	gateUp, down, routers := c.mlpMatrices()
	layers := float64(len(m.blocks))
	mlpUp, mlp := 2*n*(gateUp+routers)/layers, 2*n*(gateUp+down+routers)/layers // of a layer on average

	replays := int64(len(m.visits) - len(m.blocks)) // forward halves that segments run again
	after := c.family.norms.mlpOut != ""            // outputs of sublayers are saved with them, for the norms
	sum := 0.0
	if !after || a.MLP == Recompute {
		sum += float64(replays) * mlp
	}
	if m.tiles.MLP > 0 || a.MLP == Recompute {
		sum += float64(len(m.blocks)) * mlpUp
	}
	if after && a.MLP == Recompute { // the output
		sum += float64(len(m.blocks)) * mlp
	}
	kinds := [2]struct {
		mixerFlops
		layers float64
	}{{full, float64(m.plans.fulls())}, {linear, float64(m.plans.linears)}}
	for i, k := range kinds {
		share := k.layers / float64(len(m.blocks)) // of the replays
		output := k.out
		if a.QKV == Recompute { // the gate's input is recomputed
			output += k.gate
		}
		if after {
			output = 0
		}
		switch {
		case a.Attention == Recompute:
			sum += (k.layers + share*float64(replays)) * (k.in + k.core + k.out)
		case a.MLP == Recompute: // the residual stream before the MLP is recomputed
			sum += (k.layers + share*float64(replays)) * output
		default:
			sum += share * float64(replays) * output
		}
		if a.QKV == Recompute && (a.Attention != Recompute || i == 0 && a.groups() > 1) {
			if i == 0 {
				sum += k.layers * k.again
			} else {
				sum += k.layers * k.gate
			}
		}
	}
	return sum
}

// mixerFlops are the forward operations of a mixer: of the projections before it, of the mixer, and
// of the projection after it. in includes gate, the projection to the output's gate, and again,
// what is computed again if q, k and v are not saved.
type mixerFlops struct{ in, again, core, out, gate float64 }
