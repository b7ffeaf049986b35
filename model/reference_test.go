package model

import (
	"fmt"
	"math"

	"ulysses/internal/ref"
)

// reference is the whole model in float64, forward alone and by definition: what the passes and their derivatives are held to.
type reference struct {
	cfg *Config
	w   map[string][]float64
}

// linear is x·Wᵀ + b, rows of in.
func (r *reference) linear(x []float64, in int64, name string) []float64 {
	w, b := r.w[name+".weight"], r.w[name+".bias"]
	out := int64(len(w)) / in
	y := make([]float64, int64(len(x))/in*out)
	for i := range y {
		row, col := int64(i)/out, int64(i)%out
		if b != nil {
			y[i] = b[col]
		}
		for k := range in {
			y[i] += x[row*in+k] * w[col*in+k]
		}
	}
	return y
}

func (r *reference) norm(x []float64, n int64, name string) []float64 {
	y, _ := ref.RMSNorm(n, x, r.w[name+".weight"], 0, r.cfg.RMSNormEps)
	return y
}

// frequencies are written here once more, from the formulas of the papers and of transformers.
func (r *reference) frequencies() []float64 {
	f := ref.RopeFrequencies(r.cfg.Rope.Theta, r.cfg.HeadDim)
	switch rope := r.cfg.Rope; rope.Type {
	case "linear":
		for i := range f {
			f[i] /= rope.Factor
		}
	case "llama3":
		f = ref.Llama3{Factor: rope.Factor, LowFreqFactor: rope.LowFreqFactor, HighFreqFactor: rope.HighFreqFactor,
			OriginalLength: rope.OriginalMaxPositionEmbeddings}.Scale(f)
	}
	for i := range f {
		f[i] = float64(float32(f[i])) // as the device has them
	}
	return f
}

// loss is ΣNLL over the whole sequence.
func (r *reference) loss(s *sequence) float64 {
	c := r.cfg
	tokens := int64(len(s.ids))
	table := r.w["model.embed_tokens.weight"]
	x := ref.Embedding(c.HiddenSize, table, wide(s.ids))
	cos, sin := ref.RopeTable[float64](wide(s.positions), r.frequencies(), 1)
	shape := &ref.Attention{Hq: c.NumAttentionHeads, Hkv: c.NumKeyValueHeads, D: c.HeadDim, Dv: c.HeadDim, CuQ: s.cu, CuK: s.cu,
		Causal: true, Scale: 1 / math.Sqrt(float64(c.HeadDim))}
	for i := range c.NumHiddenLayers {
		name := func(part string) string { return fmt.Sprintf("model.layers.%d.%s", i, part) }
		n := r.norm(x, c.HiddenSize, name("input_layernorm"))
		q, k, v := r.linear(n, c.HiddenSize, name("self_attn.q_proj")), r.linear(n, c.HiddenSize, name("self_attn.k_proj")),
			r.linear(n, c.HiddenSize, name("self_attn.v_proj"))
		if c.QKNorm() {
			q, k = r.norm(q, c.HeadDim, name("self_attn.q_norm")), r.norm(k, c.HeadDim, name("self_attn.k_norm"))
		}
		q = ref.Rope(tokens, shape.Hq, shape.D, q, cos, sin, false)
		k = ref.Rope(tokens, shape.Hkv, shape.D, k, cos, sin, false)
		mixed, _ := ref.AttentionForward(shape, q, k, v)
		add(x, r.linear(mixed, shape.Hq*shape.D, name("self_attn.o_proj")))
		n = r.norm(x, c.HiddenSize, name("post_attention_layernorm"))
		y := ref.SwiGLU(r.linear(n, c.HiddenSize, name("mlp.gate_proj")), r.linear(n, c.HiddenSize, name("mlp.up_proj")))
		add(x, r.linear(y, c.IntermediateSize, name("mlp.down_proj")))
	}
	matrix := "lm_head"
	if c.TieWordEmbeddings {
		matrix = "model.embed_tokens"
	}
	logits := r.linear(r.norm(x, c.HiddenSize, "model.norm"), c.HiddenSize, matrix)
	nll, _ := ref.CrossEntropy(c.VocabSize, logits, wide(s.targets), 1)
	return ref.Sum(nll)
}

// slope is the derivative of the loss along a direction of one parameter, by central differences.
func (r *reference) slope(s *sequence, name string, direction []float64) float64 {
	const step = 1e-5
	w := r.w[name]
	defer func() { r.w[name] = w }()
	at := func(step float64) float64 {
		moved := append([]float64(nil), w...)
		for i, d := range direction {
			moved[i] += step * d
		}
		r.w[name] = moved
		return r.loss(s)
	}
	return (at(step) - at(-step)) / (2 * step)
}

func add(x, y []float64) {
	for i := range x {
		x[i] += y[i]
	}
}

func wide(x []int32) []int64 {
	y := make([]int64, len(x))
	for i, v := range x {
		y[i] = int64(v)
	}
	return y
}
