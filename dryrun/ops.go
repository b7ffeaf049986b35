package dryrun

import (
	"cmp"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// enqueue charges the time of an operation; device.Calls calls it for all of them. The time is that
// of the arithmetic or of the memory traffic, whichever is longer, and at least Rates.Launch. By
// default the traffic is one pass over each operand; costs has the exceptions.
func (d *Device) enqueue(s device.Stream, op device.Op, args unsafe.Pointer) error {
	c := cost{rate: 1, bytes: memoryTraffic(op, args)}
	if f := costs[op]; f != nil {
		f(&c, &d.rates, args)
	}
	if op == device.OpCopy && d.asynchronous() {
		if a := (*device.Copy)(args); (a.Dst.Where == tensor.Host) != (a.Src.Where == tensor.Host) {
			// the link between host and device sets the time
			return d.charge(s, max(d.rates.Launch, float64(a.Dst.Bytes())/d.rates.Copies))
		}
	}
	return d.charge(s, max(d.rates.Launch, c.flops/c.rate, float64(c.bytes)/d.rates.Memory))
}

// memoryTraffic returns the bytes of the passes over the operands of an operation.
func memoryTraffic(op device.Op, args unsafe.Pointer) (bytes int64) {
	o := &device.Operations[op]
	for i := range o.Operands {
		p := &o.Operands[i]
		bytes += p.Passes(args) * p.Tensor(args).Bytes()
	}
	return bytes
}

// Host executes no operation and adds the time of operations of the host's CPU threads to a Device.
// Its operations take the time of their memory traffic and end before the call returns.
type Host struct{ device.Calls }

// Host returns the CPU threads of the rank.
func (d *Device) Host() *Host {
	return &Host{device.NewCalls(func(_ device.Stream, op device.Op, args unsafe.Pointer) error {
		return d.charge(nil, float64(memoryTraffic(op, args))/or(d.rates.Host, d.rates.Memory))
	})}
}

// Close does nothing.
func (h *Host) Close() {}

// cost is the work of one operation.
type cost struct {
	flops, rate float64 // arithmetic in FLOP, and its rate in FLOP/s
	bytes       int64   // memory traffic
}

// costs changes the cost of operations whose time memory traffic over their operands does not
// determine.
var costs = [len(device.Operations)]func(c *cost, r *Rates, args unsafe.Pointer){
	device.OpGemm: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.Gemm)(args)
		c.flops, c.rate = 2*float64(a.C.Numel())*float64(a.A.Dim(1)), r.Products
	},
	// The rows of all experts together, and all matrices: most experts have rows.
	device.OpGroupedGemm: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.GroupedGemm)(args)
		c.flops, c.rate = 2*float64(a.C.Numel())*float64(a.A.Dim(1)), r.Products
	},
	device.OpGroupedGemmWeights: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.GroupedGemmWeights)(args)
		c.flops, c.rate = 2*float64(a.A.Numel())*float64(a.B.Dim(1)), r.Products
	},
	device.OpAttentionForward: func(c *cost, r *Rates, args unsafe.Pointer) {
		c.flops, c.rate = attentionFlops((*device.Attention)(args)), r.Attention
	},
	device.OpAttentionBackward: func(c *cost, r *Rates, args unsafe.Pointer) {
		c.flops, c.rate = 2.5*attentionFlops(&(*device.AttentionGrad)(args).Attention), r.Gradient
	},
	// Only the rows of the table that the tokens use are read or added to.
	device.OpEmbeddingForward: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.Embedding)(args)
		c.bytes = a.IDs.Bytes() + 2*a.Y.Bytes()
	},
	device.OpEmbeddingBackward: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.EmbeddingGrad)(args)
		c.bytes = a.IDs.Bytes() + 3*a.DY.Bytes()
	},
	// The gradient reads the logits a second time, after they have left the cache.
	device.OpCrossEntropy: func(c *cost, r *Rates, args unsafe.Pointer) {
		if a := (*device.CrossEntropy)(args); !a.DLogits.IsNil() {
			c.bytes += a.Logits.Bytes()
		}
	},
	device.OpGatedDeltaForward: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.GatedDelta)(args)
		c.flops, c.rate = deltaFlops(a.K, a.V, a.Chunk), r.Delta
	},
	device.OpGatedDeltaBackward: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.GatedDeltaGrad)(args)
		c.flops, c.rate = 2.5*deltaFlops(a.K, a.V, a.Chunk), or(r.DeltaBack, r.Delta)
	},
	// Two thirds of the rule's forward pass, because no outputs are computed. The transition matrix
	// [Dk, Dk] counts as much as the state.
	device.OpDeltaState: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.DeltaState)(args)
		c.flops, c.rate = deltaFlops(a.K, a.V, a.Chunk)*2/3, r.Delta
		if !a.Transition.IsNil() {
			c.flops *= 2
		}
	},
	device.OpDeltaStateGrad: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.DeltaStateGrad)(args)
		c.flops, c.rate = deltaFlops(a.K, a.DOut, a.Chunk)*2/3, r.Delta
	},
	device.OpDeltaFold: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.DeltaFold)(args)
		c.flops, c.rate = 2*float64(a.Y.Numel())*float64(a.M.Shape[2]), r.Delta
	},
	device.OpDeltaGatesForward:  stencil,
	device.OpDeltaGatesBackward: stencil,
	device.OpConv1dForward:      stencil,
	device.OpConv1dBackward:     stencil,
}

// stencil sets the cost of operations whose time on a CPU is that of arithmetic on each token and
// its neighbours. Their rate is measured in bytes/s of the operands.
func stencil(c *cost, r *Rates, _ unsafe.Pointer) {
	c.flops, c.rate = float64(c.bytes), or(r.Stencil, r.Memory)
}

// chunk is the assumed number of tokens of a chunk if the call leaves the choice to the device.
const chunk = 64

// deltaFlops returns the FLOP of the gated delta rule's forward pass for k [T, Hk, Dk] and
// v [T, Hv, Dv], in chunks of that many tokens: products with the state and products within a
// chunk.
func deltaFlops(k, v tensor.Tensor, tokens int64) float64 {
	dk, dv := float64(k.Shape[2]), float64(v.Shape[2])
	c := float64(cmp.Or(tokens, chunk))
	return float64(v.Shape[0]) * float64(v.Shape[1]) * (6*dk*dv + 2*c*(3*dk+2*dv))
}

// or returns a rate, or the alternative if the rate is unknown.
func or(rate, other float64) float64 {
	if rate > 0 {
		return rate
	}
	return other
}

// attentionFlops returns the FLOP of attention's forward pass: two products for each pair of a
// query with a visible key. A block mask counts as if it hid none, because its memory is absent.
func attentionFlops(a *device.Attention) float64 {
	pairs := 0.0
	if a.CuQ == nil {
		sq, sk := a.Q.Shape[0], a.K.Shape[0]
		pairs = visiblePairs(a, sq, sk, sk-sq)
	}
	for i := 1; i < len(a.CuQ); i++ {
		sq, sk := a.CuQ[i]-a.CuQ[i-1], a.CuK[i]-a.CuK[i-1]
		shift := sk - sq
		if a.Shift != nil { // in rows of the call; here it is in tokens of the document
			shift = a.Shift[i-1] + a.CuQ[i-1] - a.CuK[i-1]
		}
		pairs += visiblePairs(a, sq, sk, shift)
	}
	return 2 * pairs * float64(a.Q.Shape[1]) * float64(a.Q.Shape[2]+a.V.Shape[2])
}

// visiblePairs returns the number of pairs of a query with a visible key in a document of sq
// queries and sk keys, in which query i is aligned with key i + shift: all sq·sk pairs, minus the
// keys after the last and before the first visible key of each query.
func visiblePairs(a *device.Attention, sq, sk, shift int64) float64 {
	left, right := int64(-1), int64(-1)
	if w := a.Window; w != nil {
		const wide = 1 << 60 // sums with it do not overflow
		left, right = min(w.Left, wide), min(w.Right, wide)
	}
	if a.Causal && (right < 0 || right > 0) {
		right = 0
	}
	pairs := float64(sq) * float64(sk)
	if right >= 0 { // keys from i + shift + right + 1 on are not visible to query i
		pairs -= triangle(sq, sk, sk-shift-right-1)
	}
	if left >= 0 { // the same, counted from the last query and the last key
		pairs -= triangle(sq, sk, sq-1+shift-left)
	}
	return max(0, pairs)
}

// triangle returns Σ min(sk, max(0, most - i)) over the queries i < sq.
func triangle(sq, sk, most int64) float64 {
	whole := min(sq, max(0, most-sk)) // queries with all sk keys
	rest := min(sq, max(0, most)) - whole
	first := float64(min(sk, max(0, most-whole)))
	return float64(whole)*float64(sk) + float64(rest)*(2*first-float64(rest)+1)/2
}
