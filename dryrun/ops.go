package dryrun

import (
	"ulysses/device"
	"ulysses/tensor"
)

// pass is work that memory sets the pace of: each tensor is read or written once.
func (d *Device) pass(s device.Stream, touched ...tensor.Tensor) error {
	return d.work(s, 0, 1, touched...)
}

// or returns a rate, or the alternative if the rate is unknown.
func or(rate, other float64) float64 {
	if rate > 0 {
		return rate
	}
	return other
}

// work takes as long as its arithmetic or its tensors, whichever is longer.
func (d *Device) work(s device.Stream, flops, rate float64, touched ...tensor.Tensor) error {
	bytes := int64(0)
	for _, t := range touched {
		if !t.IsNil() {
			bytes += t.Bytes()
		}
	}
	return d.take(s, max(d.rates.Launch, flops/rate, float64(bytes)/d.rates.Memory))
}

// Copy between the host and a device goes by the link between them.
func (d *Device) Copy(s device.Stream, dst, src tensor.Tensor) error {
	if d.late() && (dst.Where == tensor.Host) != (src.Where == tensor.Host) {
		return d.take(s, max(d.rates.Launch, float64(dst.Bytes())/d.rates.Copies))
	}
	return d.pass(s, dst, src)
}

func (d *Device) Fill(s device.Stream, dst tensor.Tensor, _ float64) error { return d.pass(s, dst) }
func (d *Device) Add(s device.Stream, dst, a, b tensor.Tensor) error       { return d.pass(s, dst, a, b) }
func (d *Device) Scale(s device.Stream, x tensor.Tensor, _ float64) error  { return d.pass(s, x, x) }
func (d *Device) ColumnSum(s device.Stream, dst, x tensor.Tensor) error    { return d.pass(s, dst, x) }
func (d *Device) Sum(s device.Stream, out, x tensor.Tensor) error          { return d.pass(s, out, x) }
func (d *Device) SumSquares(s device.Stream, out, x tensor.Tensor) error   { return d.pass(s, out, x) }

func (d *Device) Gemm(s device.Stream, a *device.Gemm) error {
	added := tensor.Tensor{}
	if a.Accumulate {
		added = a.C
	}
	return d.work(s, 2*float64(a.C.Numel())*float64(a.A.Dim(1)), d.rates.Products, a.A, a.B, a.C, a.Bias, added)
}

func (d *Device) RMSNormForward(s device.Stream, a *device.RMSNorm) error {
	return d.pass(s, a.X, a.W, a.Y, a.RStd)
}

func (d *Device) RMSNormBackward(s device.Stream, a *device.RMSNormGrad) error {
	added := tensor.Tensor{}
	if a.AddDX {
		added = a.DX
	}
	return d.pass(s, a.X, a.W, a.RStd, a.DY, a.DX, added, a.DW)
}

func (d *Device) RopeTable(s device.Stream, a *device.RopeTable) error {
	return d.pass(s, a.Positions, a.Freq, a.Cos, a.Sin)
}

func (d *Device) Rope(s device.Stream, a *device.Rope) error {
	return d.pass(s, a.X, a.Y, a.Cos, a.Sin, a.RStd)
}

func (d *Device) SwiGLUForward(s device.Stream, a *device.SwiGLU) error {
	return d.pass(s, a.Gate, a.Up, a.Y)
}

func (d *Device) SwiGLUBackward(s device.Stream, a *device.SwiGLUGrad) error {
	restored := tensor.Tensor{}
	if a.Restore {
		restored = a.DY
	}
	return d.pass(s, a.Gate, a.Up, a.DY, a.DGate, a.DUp, restored)
}

func (d *Device) EmbeddingForward(s device.Stream, a *device.Embedding) error {
	return d.pass(s, a.IDs, a.Y, a.Y)
}

func (d *Device) EmbeddingBackward(s device.Stream, a *device.EmbeddingGrad) error {
	return d.pass(s, a.IDs, a.DY, a.DY, a.DY)
}

func (d *Device) CrossEntropy(s device.Stream, a *device.CrossEntropy) error {
	again := tensor.Tensor{}
	if !a.DLogits.IsNil() {
		again = a.Logits
	}
	return d.pass(s, a.Logits, a.Targets, a.NLL, again, a.DLogits)
}

func (d *Device) AttentionForward(s device.Stream, a *device.Attention) error {
	return d.work(s, attentionFlops(a), d.rates.Attention, a.Q, a.K, a.V, a.Out, a.LSE)
}

func (d *Device) AttentionBackward(s device.Stream, a *device.AttentionGrad) error {
	return d.work(s, 2.5*attentionFlops(&a.Attention), d.rates.Gradient, a.Q, a.K, a.V, a.Out, a.LSE, a.DOut, a.DQ, a.DK, a.DV)
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

func (d *Device) AdamW(s device.Stream, a *device.AdamW) error {
	return d.pass(s, a.W, a.G, a.M, a.V, a.W, a.M, a.V, a.Low)
}

func (d *Device) SGD(s device.Stream, a *device.SGD) error { return d.pass(s, a.W, a.G, a.W, a.Low) }
