package model

import (
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/sp"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/ref"
)

// sequence has the tokens of a whole micro-batch.
type sequence struct {
	ids, targets, positions []int32
	cu                      []int64
	batch                   int64 // Batch.Length; 0 = that of these documents
}

// documents returns a sequence of random documents of these lengths. Targets are shifted, and some
// are ignored.
func documents(vocab int64, lengths ...int64) *sequence {
	r := rand.New(rand.NewPCG(1, uint64(len(lengths))))
	s := &sequence{cu: []int64{0}}
	for _, n := range lengths {
		for i := range n {
			s.ids = append(s.ids, int32(r.Int64N(vocab)))
			s.positions = append(s.positions, int32(i))
		}
		s.cu = append(s.cu, s.cu[len(s.cu)-1]+n)
	}
	for i := range s.ids {
		s.targets = append(s.targets, -100)
		if i+1 < len(s.ids) && s.positions[i+1] != 0 && i%7 != 3 {
			s.targets[i] = s.ids[i+1]
		}
	}
	return s
}

// length returns Batch.Length.
func (s *sequence) length() int64 {
	if s.batch > 0 {
		return s.batch
	}
	return int64(slices.Max(s.positions)) + 1
}

// sequences returns the document of each token, -1 without a target, and the targets of each
// document.
func (s *sequence) sequences() (of []int32, targets []int64) {
	for d := range s.cu[1:] {
		n := int64(0)
		for i := s.cu[d]; i < s.cu[d+1]; i++ {
			if of = append(of, int32(d)); s.targets[i] < 0 {
				of[i] = -1
			} else {
				n++
			}
		}
		targets = append(targets, n)
	}
	return of, targets
}

func (s *sequence) valid() (n int64) {
	for _, id := range s.targets {
		if id >= 0 {
			n++
		}
	}
	return n
}

// configs are small models that have all differences between model types.
func configs(t testing.TB) map[string]*Config {
	base := map[string]any{"vocab_size": 23, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
		"num_attention_heads": 6,
		"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.3}
	make := func(more map[string]any) *Config {
		if more["model_type"] == "qwen3_5_moe_text" { // all layers have experts
			base := maps.Clone(base)
			delete(base, "intermediate_size")
			maps.Copy(base, more)
			c, err := ConfigFromMap(base)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		fields := map[string]any{}
		for _, m := range []map[string]any{base, more} {
			for k, v := range m {
				fields[k] = v
			}
		}
		c, err := ConfigFromMap(fields)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	return map[string]*Config{
		"llama": make(map[string]any{"model_type": "llama"}),
		"llama3": make(map[string]any{"model_type": "llama", "attention_bias": true, "mlp_bias": true,
			"num_key_value_heads": 3,
			"rope_theta":          500.0,
			"rope_scaling": map[string]any{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
				"high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
		"qwen2": make(map[string]any{"model_type": "qwen2", "tie_word_embeddings": true,
			"rope_parameters": map[string]any{"rope_type": "linear", "factor": 2.0, "rope_theta": 1000}}),
		"qwen3": make(map[string]any{"model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": true,
			"use_sliding_window": true, "sliding_window": 3, "max_window_layers": 1,
			"rope_scaling": map[string]any{"rope_type": "longrope", "original_max_position_embeddings": 8,
				"short_factor": []any{1, 1, 1, 1, 1},
				"long_factor":  []any{1, 1.5, 2, 3, 4}}}),
		"mistral": make(map[string]any{"model_type": "mistral", "head_dim": 8, "sliding_window": 5}),
		"ministral3": make(map[string]any{"model_type": "ministral3", "head_dim": 8, "sliding_window": 9,
			"rope_parameters": map[string]any{"rope_type": "yarn", "factor": 8.0, "rope_theta": 300.0, "mscale": 1.0,
				"mscale_all_dim": 1.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.7}}),
		"gemma2": make(map[string]any{"model_type": "gemma2", "head_dim": 6, "num_hidden_layers": 3,
			"sliding_window":        5,
			"query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
		"gemma3": make(map[string]any{"model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 3,
			"sliding_window":         4,
			"sliding_window_pattern": 2, "query_pre_attn_scalar": 16, "attention_bias": true,
			"tie_word_embeddings":     false,
			"final_logit_softcapping": 6.0, "rope_local_base_freq": 50.0, "rope_theta": 700.0,
			"rope_scaling": map[string]any{"rope_type": "linear", "factor": 4.0}}),
		"qwen3_5": make(map[string]any{"model_type": "qwen3_5_text", "head_dim": 8, "full_attention_interval": 2,
			"attention_bias":       true,
			"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
			"linear_value_head_dim": 9, "linear_conv_kernel_dim": 3,
			"partial_rotary_factor": 0.5}),
		"granite": make(map[string]any{"model_type": "granite", "mlp_bias": true, "embedding_multiplier": 3.0,
			"residual_multiplier":  0.5,
			"attention_multiplier": 0.2, "logits_scaling": 2.5}),
		"smollm3": make(map[string]any{"model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": true,
			"sliding_window": 4}),
		"phi3": make(map[string]any{"model_type": "phi3", "head_dim": 10, "sliding_window": 7,
			"partial_rotary_factor": 0.6}),
		"olmo2": make(map[string]any{"model_type": "olmo2", "attention_bias": true}),
		"olmo3": make(map[string]any{"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 4,
			"rope_theta": 300.0}),
		"deepseek_v2": make(latent(map[string]any{"model_type": "deepseek_v2", "first_k_dense_replace": 1,
			"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14, "n_shared_experts": 2,
			"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 3.0,
			"output_router_logits": true})),
		"deepseek_v3": make(latent(map[string]any{"model_type": "deepseek_v3", "first_k_dense_replace": 1,
			"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14, "n_shared_experts": 1,
			"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5,
			"q_lora_rank": 14, "attention_bias": true,
			"rope_scaling": map[string]any{"rope_type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.6,
				"original_max_position_embeddings": 16}})),
		"glm4_moe_lite": make(latent(map[string]any{"model_type": "glm4_moe_lite", "rope_interleave": false,
			"mlp_layer_types":  slices.Repeat([]any{"dense", "sparse"}, 32),
			"n_routed_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 14, "n_shared_experts": 2,
			"tie_word_embeddings": true})),
		"glm": make(map[string]any{"model_type": "glm", "head_dim": 8, "attention_bias": false}),
		"seed_oss": make(map[string]any{"model_type": "seed_oss", "head_dim": 8, "residual_dropout": 0,
			"mlp_bias": true}),
		"glm4": make(map[string]any{"model_type": "glm4", "head_dim": 8, "attention_bias": true}),
		"mixtral": make(map[string]any{"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
			"sliding_window": 9}),
		"biased": make(map[string]any{"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
			"use_expert_bias":      true,
			"output_router_logits": true, "router_aux_loss_coef": 0.3}),
		"qwen3_moe": make(map[string]any{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3,
			"moe_intermediate_size": 14, "num_hidden_layers": 3,
			"head_dim": 10, "mlp_only_layers": []any{1}, "output_router_logits": true, "router_aux_loss_coef": 0.7}),
		"qwen2_moe": make(map[string]any{"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 3,
			"moe_intermediate_size": 14, "shared_expert_intermediate_size": 10, "num_hidden_layers": 3,
			"mlp_only_layers": []any{1}, "use_sliding_window": true, "sliding_window": 5}),
		"olmoe": make(map[string]any{"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2,
			"output_router_logits": true}),
		"glm4_moe": make(map[string]any{"model_type": "glm4_moe", "n_routed_experts": 9, "num_experts_per_tok": 5,
			"moe_intermediate_size": 14, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
			"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 8, "use_qk_norm": true,
			"attention_bias": true}),
		"minimax_m2": make(map[string]any{"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 3,
			"intermediate_size": 20, "head_dim": 8, "rotary_dim": 4}),
		"ernie4_5": make(map[string]any{"model_type": "ernie4_5", "use_bias": true, "head_dim": 6}),
		"ernie4_5_moe": make(map[string]any{"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 3,
			"moe_intermediate_size": 14, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
			"num_hidden_layers": 4, "moe_layer_end_index": 2, "output_router_logits": true}),
		"qwen3_5_moe": make(map[string]any{"model_type": "qwen3_5_moe_text", "head_dim": 8,
			"full_attention_interval": 2,
			"linear_num_key_heads":    2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
			"linear_value_head_dim": 9, "linear_conv_kernel_dim": 3,
			"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14,
			"shared_expert_intermediate_size": 24}),
		"qwen3_next": make(map[string]any{"model_type": "qwen3_next", "head_dim": 8, "full_attention_interval": 2,
			"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
			"linear_value_head_dim": 9, "linear_conv_kernel_dim": 3, "mlp_only_layers": []any{1},
			"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14,
			"shared_expert_intermediate_size": 10}),
		"gpt_oss": make(map[string]any{"model_type": "gpt_oss", "num_local_experts": 0, "head_dim": 10,
			"sliding_window": 5}),
		"gpt_oss_moe": make(map[string]any{"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2,
			"intermediate_size": 20, "head_dim": 10, "sliding_window": 5}),
	}
}

// latent returns fields with sizes of latent attention. There are 6 query heads as in other models,
// with a key head each.
func latent(more map[string]any) map[string]any {
	fields := map[string]any{"num_key_value_heads": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4,
		"v_head_dim": 7}
	maps.Copy(fields, more)
	return fields
}

// weights returns values for every parameter. They depend on its name only.
func weights(m *Model) map[string][]float32 {
	w := map[string][]float32{}
	for _, g := range m.Groups() {
		for _, p := range g.Params {
			seed := uint64(0)
			for _, c := range p.Name {
				seed = seed*31 + uint64(c)
			}
			r := rand.New(rand.NewPCG(seed, 7))
			x, scale := make([]float32, p.Numel()), float32(0.3)
			if len(p.Shape) > 2 {
				scale = 1 // a convolution adds up few products
			}
			for i := range x {
				x[i] = scale * float32(r.NormFloat64())
				switch p.fill {
				case ones:
					x[i]++
				case decays:
					x[i] -= 2 // states that last some tokens
				}
			}
			w[p.Name] = x
		}
	}
	return w
}

// rank is a model with its memory on one rank.
type rank struct {
	*Model
	c      *Ctx
	values [][]float32 // by group
	grads  [][]float32
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// newRank returns a model with an arena of the size that Memory returns for sequences of this many
// tokens.
func newRank(c comm.Comm, cfg *Config, tokens int64, backward bool) *rank {
	dev, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	m, err := New(dev, c, cfg, Options{})
	must(err)
	m.SetSequences(mostDocuments)
	setBiases(m)
	r := &rank{Model: m}
	r.bind()
	s, err := dev.NewStream()
	must(err)
	lo, hi := comm.Shard(tokens, c.Size(), c.Rank())
	table, err := m.Memory(hi-lo, tokens, backward)
	must(err)
	arena, err := device.NewArena(dev, "activations", Bytes(table))
	must(err)
	r.c = &Ctx{Stream: s, Arena: arena, Clock: clock.New()}
	return r
}

// setBiases sets the biases of experts, if there are any, so that they change choices.
func setBiases(m *Model) {
	for _, b := range m.Biases() {
		for i := range b.Values {
			b.Values[i] = float32(i%3-1) * 0.4
		}
	}
}

func (r *rank) bind() {
	for _, g := range r.Groups() {
		n := g.Numel()
		v, d := make([]float32, n), make([]float32, n)
		r.values, r.grads = append(r.values, v), append(r.grads, d)
		g.Bind(tensor.OfFloat32(v, n), tensor.Tensor{}, tensor.OfFloat32(d, n))
	}
}

func (r *rank) close() {
	r.c.Arena.Free()
	if r.c.Host != nil {
		r.c.Host.Free()
	}
	r.Close()
	r.dev.Close()
}

func (r *rank) set(w map[string][]float32) {
	for _, g := range r.Groups() {
		for _, p := range g.Params {
			copy(p.Value.Float32s(), w[p.Name])
		}
	}
}

// mostDocuments is the largest number of documents in a test. Each counts as a sequence of a
// micro-batch.
const mostDocuments = 8

// shard returns this rank's shard of a sequence.
func shard(c comm.Comm, s *sequence) *Batch {
	b, err := sp.NewBatch(c, sp.BatchSpec{Batch: 1, Seq: int64(len(s.ids)), CuSeqlens: s.cu})
	must(err)
	part := func(x []int32) tensor.Tensor {
		mine := append([]int32(nil), x[b.Lo():b.Hi()]...)
		return tensor.OfInt32(mine, int64(len(mine)))
	}
	of, targets := s.sequences()
	return &Batch{SP: b, IDs: part(s.ids), Targets: part(s.targets), Positions: part(s.positions), Length: s.length(),
		GradScale: 1, Sequences: part(of), SequenceTargets: targets}
}

// outcome has the loss and the gradients, summed over ranks.
type outcome struct {
	Loss
	grads map[string][]float64
}

func TestMain(m *testing.M) { os.Exit(mpitest.Main(m)) }

// ranks runs f on n ranks: goroutines, or processes if n is their number. One rank is always
// possible.
func ranks(t testing.TB, n int, f func(c comm.Comm) error) {
	t.Helper()
	if n > 1 {
		mpitest.Ranks(t, n, f)
	} else if err := comm.RunLocal(1, f); err != nil {
		t.Fatal(err)
	}
}

// several returns the largest possible number of ranks.
func several() int { sizes := mpitest.Sizes(); return sizes[len(sizes)-1] }

// train runs forward and backward on n ranks.
func train(t testing.TB, n int, cfg *Config, s *sequence, prepare func(r *rank)) outcome {
	t.Helper()
	var o outcome
	var mu sync.Mutex
	ranks(t, n, func(c comm.Comm) error {
		r := newRank(c, cfg, int64(len(s.ids)), true)
		defer r.close()
		r.set(weights(r.Model))
		if prepare != nil {
			prepare(r)
		}
		loss, err := r.ForwardBackward(r.c, shard(c, s))
		if err != nil {
			return err
		}
		all := []float64{loss.Sum, float64(loss.Tokens), loss.Balance}
		for _, g := range r.grads {
			all = append(all, ref.Convert[float64](g)...)
		}
		if err := c.AllReduce(r.c.Stream, tensor.Of(unsafe.Pointer(&all[0]), tensor.F64, int64(len(all))),
			comm.Sum); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		o = outcome{Loss{all[0], int64(all[1]), all[2]}, map[string][]float64{}} // the same from every rank
		all = all[3:]
		for _, g := range r.Groups() {
			for _, p := range g.Params {
				o.grads[p.Name], all = all[:p.Numel()], all[p.Numel():]
			}
		}
		return nil
	})
	return o
}

// far returns max|a-b| / max|b|, +Inf with NaN. It is 0 if a and b are 0, as the gradients of an
// expert without tokens are.
func far(a, b []float64) float64 {
	var d, size float64
	for i := range b {
		e := math.Abs(a[i] - b[i])
		if math.IsNaN(e) {
			return math.Inf(1)
		}
		d, size = max(d, e), max(size, math.Abs(b[i]))
	}
	if d == 0 {
		return 0
	}
	return d / size
}

func norm2(x []float64) (s float64) {
	for _, v := range x {
		s += v * v
	}
	return math.Sqrt(s)
}

// each runs a test on all small models.
func each(t *testing.T, f func(t *testing.T, cfg *Config)) {
	all := configs(t)
	for _, name := range slices.Sorted(maps.Keys(all)) { // the same order on all ranks
		t.Run(name, func(t *testing.T) { f(t, all[name]) })
	}
}
