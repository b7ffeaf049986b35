package dryrun

import (
	"cmp"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// enqueue charges an operation: device.Calls. It takes as long as its arithmetic or its memory
// traffic, whichever is longer. cost has the operations that do more than go through their
// operands.
func (d *Device) enqueue(s device.Stream, op device.Op, args unsafe.Pointer) error {
	o := &device.Operations[op]
	bytes := int64(0)
	for i := range o.Operands {
		p := &o.Operands[i]
		bytes += p.Passes(args) * p.Tensor(args).Bytes()
	}
	c := cost{rate: 1, bytes: bytes}
	if f := costs[op]; f != nil {
		f(&c, &d.rates, args)
	}
	if op == device.OpCopy && d.late() {
		if a := (*device.Copy)(args); (a.Dst.Where == tensor.Host) != (a.Src.Where == tensor.Host) {
			// by the link between them
			return d.take(s, max(d.rates.Launch, float64(a.Dst.Bytes())/d.rates.Copies))
		}
	}
	return d.take(s, max(d.rates.Launch, c.flops/c.rate, float64(c.bytes)/d.rates.Memory))
}

// cost is what an operation takes.
type cost struct {
	flops, rate float64 // operations, and operations a second
	bytes       int64   // of memory traffic; beforehand, of each operand once a pass
}

// costs changes the cost of operations whose time memory traffic over their operands does not
// determine.
var costs = [len(device.Operations)]func(c *cost, r *Rates, args unsafe.Pointer){
	device.OpGemm: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.Gemm)(args)
		c.flops, c.rate = 2*float64(a.C.Numel())*float64(a.A.Dim(1)), r.Products
	},
	device.OpAttentionForward: func(c *cost, r *Rates, args unsafe.Pointer) {
		c.flops, c.rate = attentionFlops((*device.Attention)(args)), r.Attention
	},
	device.OpAttentionBackward: func(c *cost, r *Rates, args unsafe.Pointer) {
		c.flops, c.rate = 2.5*attentionFlops(&(*device.AttentionGrad)(args).Attention), r.Gradient
	},
	// A row of the table is read, or added to, for each token; the others stay.
	device.OpEmbeddingForward: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.Embedding)(args)
		c.bytes = a.IDs.Bytes() + 2*a.Y.Bytes()
	},
	device.OpEmbeddingBackward: func(c *cost, r *Rates, args unsafe.Pointer) {
		a := (*device.EmbeddingGrad)(args)
		c.bytes = a.IDs.Bytes() + 3*a.DY.Bytes()
	},
	// The gradient reads the logits a second time.
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
	// Two thirds of the rule's forward pass: all but the outputs. The transition is as wide as a
	// key.
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

// stencil is the cost of operations whose time on a CPU is set by arithmetic on each token and its
// neighbours. It is measured in bytes a second.
func stencil(c *cost, r *Rates, _ unsafe.Pointer) {
	c.flops, c.rate = float64(c.bytes), or(r.Stencil, r.Memory)
}

// chunk is the number of tokens of a chunk where a call leaves the choice to the device.
const chunk = 64

// deltaFlops is the arithmetic of the gated delta rule's forward pass over k and v: products with
// the state, and within a chunk.
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

// attentionFlops is of the pairs of a query with a key that it sees.
func attentionFlops(a *device.Attention) float64 {
	pairs := 0.0
	if a.CuQ == nil {
		pairs = seen(a, a.Q.Shape[0], a.K.Shape[0])
	}
	for i := 1; i < len(a.CuQ); i++ {
		pairs += seen(a, a.CuQ[i]-a.CuQ[i-1], a.CuK[i]-a.CuK[i-1])
	}
	return 2 * pairs * float64(a.Q.Shape[1]) * float64(a.Q.Shape[2]+a.V.Shape[2])
}

// seen is the pairs of a document of sq queries and sk keys: those of a full product, less the keys
// behind the last and before the first that each query sees.
func seen(a *device.Attention, sq, sk int64) float64 {
	left, right := int64(-1), int64(-1)
	if w := a.Window; w != nil {
		left, right = w.Left, w.Right
	}
	if a.Causal && (right < 0 || right > 0) {
		right = 0
	}
	pairs := float64(sq) * float64(sk)
	if right >= 0 { // query i misses the keys from i + sk - sq + right + 1 on
		pairs -= triangle(sq, sk, sq-right-1)
	}
	if left >= 0 { // the mirror image: counted from the last query and the last key
		pairs -= triangle(sq, sk, sk-left-1)
	}
	return max(0, pairs)
}

// triangle is Σ min(sk, max(0, most - i)) over sq queries i.
func triangle(sq, sk, most int64) float64 {
	whole := min(sq, max(0, most-sk)) // queries with all sk keys
	rest := min(sq, max(0, most)) - whole
	first := float64(min(sk, max(0, most-whole)))
	return float64(whole)*float64(sk) + float64(rest)*(2*first-float64(rest)+1)/2
}
