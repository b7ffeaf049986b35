package model

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// reference is the forward pass of the whole model in float64, by definition. Tests compare losses
// with it, and gradients with its slopes.
type reference struct {
	cfg *Config
	w   map[string][]float64

	balance float64 // of the last call of loss: the loss that balances experts, times the targets
}

// biasOf returns the biases by which the experts of a module are chosen; nil if there are none.
func (r *reference) biasOf(module string) []float64 {
	block := r.cfg.family.experts.block
	return r.w[strings.TrimSuffix(module, block)+r.cfg.family.experts.biasName()]
}

// linear returns x·Wᵀ + b for lines of in elements.
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
	return r.normWith(x, n, name, r.cfg.RMSNormEps)
}

func (r *reference) normWith(x []float64, n int64, name string, eps float64) []float64 {
	y, _ := ref.RMSNorm(n, x, r.w[name+".weight"], r.cfg.NormCentre(), eps)
	return y
}

// columns returns the columns [lo, hi) of x, whose lines have n elements.
func columns(x []float64, n, lo, hi int64) (y []float64) {
	for row := int64(0); row < int64(len(x)); row += n {
		y = append(y, x[row+lo:row+hi]...)
	}
	return y
}

// frequencies computes RoPE's frequencies independently, from the formulas of the papers and of
// transformers. TestRopeGoldens compares the other types.
func (r *reference) frequencies(s *sequence, rope *Rope) []float64 {
	if rope.Switches() || rope.Type == "yarn" {
		return ref.Convert[float64](rope.Frequencies(r.cfg.RotaryDim, s.length()))
	}
	f := ref.RopeFrequencies(rope.Theta, r.cfg.RotaryDim)
	switch rope.Type {
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

// normsOf returns the names of a layer's norms in the files: before and behind attention, before
// and behind the MLP. "" = there is none.
func normsOf(modelType string) [4]string {
	switch {
	case strings.HasPrefix(modelType, "gemma"):
		return [4]string{"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
			"post_feedforward_layernorm"}
	case modelType == "olmo2" || modelType == "olmo3":
		return [4]string{1: "post_attention_layernorm", 3: "post_feedforward_layernorm"}
	case modelType == "glm4":
		return [4]string{"input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
			"post_mlp_layernorm"}
	}
	return [4]string{0: "input_layernorm", 2: "post_attention_layernorm"}
}

// loss returns ΣNLL over the whole sequence.
func (r *reference) loss(s *sequence) float64 {
	c := r.cfg
	r.balance = 0
	table := r.w["model.embed_tokens.weight"]
	x := ref.Embedding(c.HiddenSize, table, wide(s.ids))
	scale(x, c.embeddingScale(tensor.F32))
	for i := range c.NumHiddenLayers {
		name := func(part string) string { return fmt.Sprintf("model.layers.%d.%s", i, part) }
		gemma := strings.HasPrefix(c.ModelType, "gemma")
		norms := normsOf(c.ModelType)
		norm := func(x []float64, of int) []float64 {
			if norms[of] == "" {
				return slices.Clone(x)
			}
			return r.norm(x, c.HiddenSize, name(norms[of]))
		}
		n := norm(x, 0)
		var y []float64
		if c.Linear(i) {
			y = r.linearAttention(s, n, name("linear_attn"))
		} else {
			y = r.attention(s, n, name("self_attn"), c.maskOf(i), c.NoRope == nil || !c.NoRope[i])
		}
		y = norm(y, 1)
		scale(y, cmp.Or(c.ResidualScale, 1))
		add(x, y)
		n = norm(x, 2)
		activate := ref.SwiGLU[float64]
		if gemma {
			activate = ref.GELUGate[float64]
		}
		if c.Sparse(i) {
			y = r.experts(s, n, name(c.family.experts.block))
		} else {
			y = activate(r.linear(n, c.HiddenSize, name("mlp.gate_proj")),
				r.linear(n, c.HiddenSize, name("mlp.up_proj")))
			y = r.linear(y, c.IntermediateSize, name("mlp.down_proj"))
		}
		y = norm(y, 3)
		scale(y, cmp.Or(c.ResidualScale, 1))
		add(x, y)
	}
	matrix := "lm_head"
	if c.TieWordEmbeddings {
		matrix = "model.embed_tokens"
	}
	logits := r.linear(r.norm(x, c.HiddenSize, "model.norm"), c.HiddenSize, matrix)
	scale(logits, cmp.Or(c.LogitsScale, 1))
	if c.LogitSoftcap > 0 {
		for i, z := range logits {
			logits[i] = c.LogitSoftcap * math.Tanh(z/c.LogitSoftcap)
		}
	}
	nll, _ := ref.CrossEntropy(c.VocabSize, logits, wide(s.targets), 1)
	return ref.Sum(nll)
}

// experts computes the output of one token after another, with the MLPs of a token's experts in
// order.
func (r *reference) experts(s *sequence, x []float64, name string) (all []float64) {
	e, names, h := &r.cfg.Experts, r.cfg.family.experts, r.cfg.HiddenSize
	chosen := ref.Route(e.Count, e.PerToken, r.linear(x, h, name+"."+names.routerName()), r.biasOf(name),
		ref.Router{Normalize: e.Normalize, Sigmoid: e.Sigmoid, Groups: e.Groups, Kept: e.KeptGroups, Scale: e.Scale})
	for t := range int64(len(s.ids)) {
		in, y := x[t*h:(t+1)*h], make([]float64, h)
		for j := t * e.PerToken; j < (t+1)*e.PerToken; j++ {
			expert := fmt.Sprintf("%s.experts.%d.", name, chosen.Experts[j])
			var out []float64
			if names.stacked {
				hidden := r.inputsFirst(in, expert+ossGateUp)
				out = r.inputsFirst(ref.ClampedGate(hidden[:e.Size], hidden[e.Size:]), expert+ossDown)
			} else {
				out = r.linear(ref.SwiGLU(r.linear(in, h, expert+names.gate), r.linear(in, h, expert+names.up)), e.Size,
					expert+names.down)
			}
			scale(out, chosen.Weights[chosen.Rows[j]])
			add(y, out)
		}
		if e.Shared > 0 {
			shared := name + "." + names.sharedName()
			out := r.linear(ref.SwiGLU(r.linear(in, h, shared+".gate_proj"), r.linear(in, h, shared+".up_proj")),
				e.Shared, shared+".down_proj")
			if names.shared {
				scale(out, 1/(1+math.Exp(-r.linear(in, h, shared+"_gate")[0])))
			}
			add(y, out)
		}
		all = append(all, y...)
	}
	if !r.cfg.Balances() {
		return all
	}
	of, targets := s.sequences()
	for seq, n := range targets {
		for expert := range e.Count {
			count, sum := 0.0, 0.0
			for t, q := range of {
				if int(q) != seq {
					continue
				}
				sum += chosen.Probs[int64(t)*e.Count+expert]
				for _, c := range chosen.Experts[int64(t)*e.PerToken : int64(t+1)*e.PerToken] {
					if c == expert {
						count++
					}
				}
			}
			if n > 0 {
				targets := float64(n)
				r.balance += targets * float64(e.Count) * (count / targets) * (sum / targets) / float64(
					r.cfg.SparseLayers())
			}
		}
	}
	return all
}

// inputsFirst returns x·W + b of one token, with W [in, out].
func (r *reference) inputsFirst(x []float64, name string) []float64 {
	y := slices.Clone(r.w[name+ossBias])
	for i, v := range x {
		for j := range y {
			y[j] += v * r.w[name][i*len(y)+j]
		}
	}
	return y
}

func (r *reference) attention(s *sequence, x []float64, name string, kind mask, rotated bool) []float64 {
	c, tokens, rope, window := r.cfg, int64(len(s.ids)), &r.cfg.Rope, r.cfg.window(kind)
	if kind == slidingMask && c.LocalRope != nil {
		rope = c.LocalRope
	}
	cos, sin := ref.RopeTable[float64](wide(s.positions), r.frequencies(s, rope), rope.Scale)
	shape := &ref.Attention{Hq: c.NumAttentionHeads, Hkv: c.NumKeyValueHeads, D: c.HeadDim, Dv: c.HeadDim, CuQ: s.cu,
		CuK: s.cu, Causal: true, Scale: 1 / math.Sqrt(float64(c.HeadDim)), Softcap: c.ScoreSoftcap,
		Sinks: r.w[name+".sinks"]}
	if c.ScoreScale > 0 {
		shape.Scale = c.ScoreScale
	}
	if window != nil {
		shape.Window = &ref.Window{Left: window.Left, Right: window.Right}
	}
	if c.IsLatent() {
		return r.latentAttention(shape, x, name, cos, sin)
	}
	q, k, v := r.linear(x, c.HiddenSize, name+".q_proj"), r.linear(x, c.HiddenSize, name+".k_proj"),
		r.linear(x, c.HiddenSize, name+".v_proj")
	var gate []float64
	if c.OutputGate() { // [q|gate] in each head
		q, gate = columns(q, 2*c.HeadDim, 0, c.HeadDim), columns(q, 2*c.HeadDim, c.HeadDim, 2*c.HeadDim)
	}
	if c.QKNorm() {
		q, k = r.norm(q, c.HeadDim, name+".q_norm"), r.norm(k, c.HeadDim, name+".k_norm")
	}
	if strings.HasPrefix(c.ModelType, "olmo") || c.ModelType == "minimax_m2" { // over all heads
		q, k = r.norm(q, shape.Hq*shape.D, name+".q_norm"), r.norm(k, shape.Hkv*shape.D, name+".k_norm")
	}
	if rotated {
		q = ref.Rope(tokens, shape.Hq, shape.D, q, cos, sin, false)
		k = ref.Rope(tokens, shape.Hkv, shape.D, k, cos, sin, false)
	}
	if rope.QueryBeta != 0 {
		for t, gain := range ref.Gains(wide(s.positions), rope.QueryBeta, rope.QueryLength) {
			scale(q[int64(t)*shape.Hq*shape.D:][:shape.Hq*shape.D], gain)
		}
	}
	mixed, _ := ref.AttentionForward(shape, q, k, v)
	if gate != nil {
		mixed = ref.SigmoidGate(mixed, gate)
	}
	return r.linear(mixed, shape.Hq*shape.D, name+".o_proj")
}

// latentAttention is attention after section 2.1 of DeepSeek-V2, with the rows of this package.
func (r *reference) latentAttention(shape *ref.Attention, x []float64, name string, cos, sin []float64) []float64 {
	c, tokens := r.cfg, int64(len(x))/r.cfg.HiddenSize
	shape.Dv = c.VHeadDim
	q := x
	if c.QLoraRank > 0 {
		q = r.normWith(r.linear(x, c.HiddenSize, name+".q_a_proj"), c.QLoraRank, name+".q_a_layernorm", 1e-6)
		q = r.linear(q, c.QLoraRank, name+".q_b_proj")
	} else {
		q = r.linear(x, c.HiddenSize, name+".q_proj")
	}
	rank, rotated := c.KVLoraRank, c.QKRopeHeadDim
	both := r.linear(x, c.HiddenSize, name+".kv_a_proj_with_mqa")
	shared := columns(both, rank+rotated, rank, rank+rotated)
	kv := r.linear(r.normWith(columns(both, rank+rotated, 0, rank), rank, name+".kv_a_layernorm", 1e-6), rank,
		name+".kv_b_proj")
	of := c.QKNopeHeadDim + c.VHeadDim
	var k []float64
	for i := range tokens * shape.Hkv {
		k = append(k, shared[i/shape.Hkv*rotated:][:rotated]...)
		k = append(k, kv[i*of:][:c.QKNopeHeadDim]...)
	}
	q = ref.Rope(tokens, shape.Hq, shape.D, q, cos, sin, false)
	k = ref.Rope(tokens, shape.Hkv, shape.D, k, cos, sin, false)
	mixed, _ := ref.AttentionForward(shape, q, k, columns(kv, of, c.QKNopeHeadDim, of))
	return r.linear(mixed, shape.Hq*shape.Dv, name+".o_proj")
}

func (r *reference) linearAttention(s *sequence, x []float64, name string) []float64 {
	c := r.cfg
	keys, values := c.LinearNumKeyHeads*c.LinearKeyHeadDim, c.LinearNumValueHeads*c.LinearValueHeadDim
	all := 2*keys + values
	mixed := ref.Conv1dForward(&ref.Conv1d{C: all, Width: c.LinearConvKernelDim, Cu: s.cu},
		r.linear(x, c.HiddenSize, name+".in_proj_qkv"), r.w[name+".conv1d.weight"], nil)
	g, beta := ref.DeltaGates(r.linear(x, c.HiddenSize, name+".in_proj_a"),
		r.linear(x, c.HiddenSize, name+".in_proj_b"), r.w[name+".A_log"], r.w[name+".dt_bias"])
	shape := &ref.GatedDelta{Hk: c.LinearNumKeyHeads, Hv: c.LinearNumValueHeads, Dk: c.LinearKeyHeadDim,
		Dv: c.LinearValueHeadDim, Cu: s.cu, L2Norm: true, Scale: 1 / math.Sqrt(float64(c.LinearKeyHeadDim))}
	out, _ := ref.GatedDeltaForward(shape, columns(mixed, all, 0, keys), columns(mixed, all, keys, 2*keys),
		columns(mixed, all, 2*keys, all), g, beta, nil)
	y, _ := ref.GatedRMSNorm(c.LinearValueHeadDim, out, r.linear(x, c.HiddenSize, name+".in_proj_z"),
		r.w[name+".norm.weight"], c.RMSNormEps)
	return r.linear(y, values, name+".out_proj")
}

// slope returns the derivative of the loss in a direction of one parameter, by central differences
// of two steps: with one, the error that grows with its square came to 1e-5 of embeddings'
// gradients, as much as is allowed to float32.
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
		loss := r.loss(s)
		return loss + r.cfg.Experts.Balance*r.balance
	}
	return (8*(at(step)-at(-step)) - (at(2*step) - at(-2*step))) / (12 * step)
}

func scale(x []float64, f float64) {
	for i := range x {
		x[i] *= f
	}
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
