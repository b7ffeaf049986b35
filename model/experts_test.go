package model

import (
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/near"
)

// As Mixtral and Qwen3-MoE are published.
const mixtral = `{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
 "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
 "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05,
 "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000}`

const qwen3moe = `{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
 "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
 "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
 "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
 "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936}`

// As Qwen1.5-MoE-A2.7B and OLMoE-1B-7B are published.
const qwen2moe = `{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "attention_dropout": 0.0, "bos_token_id": 151643,
 "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
 "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16,
 "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": false, "rms_norm_eps": 1e-06,
 "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}`

const olmoe = `{"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": false, "attention_dropout": 0.0, "clip_qkv": null,
 "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
 "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
 "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 50304}`

const qwen35moe = `{"model_type": "qwen3_5_moe_text", "attention_bias": false, "attn_output_gate": true, "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256,
 "hidden_act": "silu", "hidden_size": 2048, "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
 "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
 "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
 "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
 "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "vocab_size": 248320}`

func TestParseExperts(t *testing.T) {
	c := parse(t, mixtral)
	if e := c.Experts; e.Count != 8 || e.PerToken != 2 || e.Size != 14336 || !e.Normalize || e.Balance != 0 ||
		c.SparseLayers() != 32 || c.Balances() || c.Rope.Theta != 1e6 {
		t.Errorf("%+v", c)
	}
	// A token uses 12.9e9 weights, of which 0.13e9 are a row of the embedding.
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, 12.75e9, 0.01e9)
	c = parse(t, qwen3moe)
	if e := c.Experts; e.Count != 128 || e.PerToken != 8 || e.Size != 768 || !e.Normalize || c.SparseLayers() != 48 ||
		!c.QKNorm() || c.QKVBias() || c.HeadDim != 128 {
		t.Errorf("%+v", c)
	}
	c = parse(t, qwen2moe)
	if e := c.Experts; e.Count != 60 || e.PerToken != 4 || e.Size != 1408 || e.Shared != 5632 || e.Normalize ||
		c.SparseLayers() != 24 || c.QKNorm() || !c.QKVBias() || c.OutBias() || c.Sliding(0) {
		t.Errorf("%+v", c)
	}
	// 2.69e9 weights are active, of which 0.31e9 are the embedding's.
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, 2.38e9, 0.01e9)
	if c = parse(t, string(with(t, qwen2moe, `"qkv_bias": false`))); c.QKVBias() {
		t.Errorf("%+v", c)
	}
	c = parse(t, string(with(t, lacking(t, olmoe, "router_aux_loss_coef"), `"output_router_logits": true`)))
	if e := c.Experts; e.Count != 64 || e.PerToken != 8 || e.Size != 1024 || e.Normalize || e.Balance != 0.01 ||
		c.SparseLayers() != 16 || c.QKVBias() || c.Rope.Theta != 1e4 {
		t.Errorf("%+v", c)
	}
	near.Value(t, "weights in products of a token", c.Flops(1, 0)/6, 1.18e9, 0.01e9)
	c = parse(t, string(with(t, lacking(t, qwen3moe, "norm_topk_prob", "num_experts"),
		`"mlp_only_layers": [1, 5], "decoder_sparse_step": 2, "num_hidden_layers": 8,
		"num_local_experts": 16, "output_router_logits": true`)))
	sparse := []int64{}
	for i := range c.NumHiddenLayers {
		if c.Sparse(i) {
			sparse = append(sparse, i)
		}
	}
	if !slices.Equal(sparse, []int64{3, 7}) || c.Experts.Normalize || c.Experts.Count != 16 ||
		c.Experts.Balance != 0.001 || !c.Balances() {
		t.Errorf("%+v, layers %v", c, sparse)
	}
	// what is written is what was read
	for _, text := range []string{mixtral, qwen3moe, string(with(t, qwen3moe, `"mlp_only_layers": [1]`))} {
		first := parse(t, text)
		again, err := first.JSON()
		if err != nil {
			t.Fatal(err)
		}
		second := parse(t, string(again))
		first.raw, second.raw = nil, nil
		if !reflect.DeepEqual(first, second) {
			t.Errorf("%+v is written as %+v", first, second)
		}
	}
	for fields, want := range map[string]string{
		`"num_experts_per_tok": 129`:       "num_experts_per_tok = 129, num_experts = 128: a token cannot have more experts",
		`"num_local_experts": 6`:           "num_experts = 128 and num_local_experts = 6: they are names of the same number",
		`"num_experts": 0`:                 "num_experts = 0: give a whole number from 1",
		`"mlp_only_layers": [48]`:          "mlp_only_layers[0] = 48: give the number of a layer, from 0 to 47",
		`"mlp_only_layers": 3`:             "mlp_only_layers = 3: give a list",
		`"router_aux_loss_coef": -1`:       "router_aux_loss_coef = -1: give a number of at least 0",
		`"moe_intermediate_size": "many"`:  "moe_intermediate_size = \"many\": give a whole number",
		`"decoder_sparse_step": 0`:         "decoder_sparse_step = 0",
		`"norm_topk_prob": "yes"`:          "norm_topk_prob = \"yes\": give true or false",
		`"output_router_logits": "always"`: "output_router_logits = \"always\": give true or false",
	} {
		if _, err := ParseConfig(with(t, qwen3moe, fields)); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", fields, err, want)
		}
	}
	if _, err := ParseConfig(with(t, mixtral, `"router_jitter_noise": 0.1`)); status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(), "router_jitter_noise = 0.1 is not built: set it to 0") {
		t.Error(err)
	}
	// Qwen3.5-MoE as it is published: a language model inside a model with vision
	for _, text := range []string{qwen35moe,
		`{"model_type": "qwen3_5_moe", "vision_config": {"depth": 12}, "text_config": ` + qwen35moe + `}`} {
		c = parse(t, text)
		if e := c.Experts; c.ModelType != "qwen3_5_moe_text" || e.Count != 256 || e.PerToken != 8 || e.Size != 512 ||
			e.Shared != 512 || !e.Normalize || c.SparseLayers() != 4 ||
			c.LinearLayers() != 3 || !c.OutputGate() || c.NormCentre() != 1 || c.IntermediateSize != 0 {
			t.Errorf("%+v", c)
		}
	}
	if again, err := c.JSON(); err != nil || parse(t, string(again)).Experts.Shared != 512 {
		t.Errorf("%s, %v", again, err)
	}
	// A model from scratch has no defaults of a published model.
	_, err := ConfigFromMap(map[string]any{"model_type": "qwen3_moe", "vocab_size": 8, "hidden_size": 8,
		"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4})
	for _, name := range []string{"num_experts", "num_experts_per_tok", "moe_intermediate_size"} {
		if err == nil || !strings.Contains(err.Error(), name+" is missing") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// experts of a model for routings by design: the router is a matrix that the test sets.
func routed(t *testing.T, count, perToken int64) *Config {
	c, err := configs(t)["qwen3_moe"].Override(map[string]any{"num_experts": count, "num_experts_per_tok": perToken,
		"mlp_only_layers": []any{}})
	must(err)
	return c
}

// All tokens choose the same experts, others have no tokens, or all experts are chosen; also with
// more ranks than tokens. The results are the results of the float64 model, on every number of
// ranks, in tiles and with recomputation, and an expert without tokens has zero gradients.
func TestUnevenExperts(t *testing.T) {
	for _, c := range []struct {
		name            string
		count, perToken int64
		router          func(expert, feature int64) float32
		unused          []int64 // experts without tokens
	}{
		// One feature of the norm's output has a large weight, so its sign chooses the expert.
		{"by sign", 6, 1, func(e, f int64) float32 {
			if f == 0 {
				return []float32{40, -40, 0, 0, 0, 0}[e]
			}
			return 0
		}, []int64{2, 3, 4, 5}},
		{"all", 4, 4, func(e, f int64) float32 { return float32(e*f%5) * 0.1 }, nil},
		{"the same two", 5, 2, func(e, f int64) float32 { return 0 }, []int64{2, 3, 4}}, // equal logits
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := routed(t, c.count, c.perToken)
			routers := func(r *rank) {
				for _, b := range r.blocks {
					router := b.mlp.(*experts).router.Value.View(c.count, cfg.HiddenSize).Float32s()
					for i := range router {
						router[i] = c.router(int64(i)/cfg.HiddenSize, int64(i)%cfg.HiddenSize)
					}
				}
			}
			for _, s := range []*sequence{documents(cfg.VocabSize, 9, 1, 13), documents(cfg.VocabSize, 3)} {
				r := newReference(t, cfg)
				for i := range cfg.NumHiddenLayers {
					w := r.w["model.layers."+string(rune('0'+i))+".mlp.gate.weight"]
					for j := range w {
						w[j] = float64(c.router(int64(j)/cfg.HiddenSize, int64(j)%cfg.HiddenSize))
					}
				}
				one := train(t, 1, cfg, s, routers)
				if want := r.loss(s); !(math.Abs(one.Sum-want) <= 2e-6*want) ||
					!(math.Abs(one.Balance-r.balance) <= 2e-6*r.balance) {
					t.Errorf("loss %v, balance %v, want %v, %v", one.Sum, one.Balance, want, r.balance)
				}
				for _, unused := range c.unused {
					for name, g := range one.grads {
						if strings.Contains(name, ".experts."+string(rune('0'+unused))+".") && norm2(g) != 0 {
							t.Errorf("gradient of %s is not 0", name)
						}
					}
				}
				for _, x := range []struct {
					Activations
					Tiles
				}{{}, {Activations{MLP: Recompute, QKV: Recompute, Segment: 2}, Tiles{}},
					{Activations{}, Tiles{MLP: 4}}, {Activations{MLP: Offload}, Tiles{}}} {
					for _, n := range append(mpitest.Sizes(), 1) {
						changes := []func(*rank){under(x.Activations, x.Tiles, int64(len(s.ids)))}
						if n > 1 && int64(n) <= c.count { // each rank has some of the experts
							changes = append(changes, divided(n, x.Activations, x.Tiles, int64(len(s.ids)), nil))
						}
						for i, change := range changes {
							what := fmt.Sprintf("%d ranks, divided %v, %v %v", n, i == 1, x.Activations, x.Tiles)
							o := train(t, n, cfg, s, func(r *rank) { routers(r); change(r) })
							if !(math.Abs(o.Sum-one.Sum) <= 1e-6*one.Sum) ||
								!(math.Abs(o.Balance-one.Balance) <= 1e-6*one.Balance) {
								t.Errorf("%s: %v, want %v", what, o.Loss, one.Loss)
							}
							for name, g := range o.grads {
								if e := far(g, one.grads[name]); !(e < 3e-5) {
									t.Errorf("%s: gradient of %s has error %.2g", what, name, e)
								}
							}
						}
					}
				}
			}
		})
	}
}

// Adapters of experts, of routers and of dense MLPs beside them are refused; "all-linear" leaves
// them out. Some experts cannot be frozen without the others.
func TestExpertsFrozenAndAdapted(t *testing.T) {
	cfg := configs(t)["qwen3_moe"] // layer 1 is dense
	dev, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer dev.Close()
	made := func(o Options) (*Model, error) { return New(dev, comm.Local(1)[0], cfg, o) }
	for _, target := range []string{"gate_proj", "down_proj", "gate", "experts.3.up_proj"} {
		_, err := made(Options{LoRA: &LoRA{Rank: 2, Alpha: 2, Targets: []string{"q_proj", target}}})
		if status.Of(err) != status.Unsupported ||
			!strings.Contains(err.Error(),
				"adapters of experts, of routers, and of the other MLPs of qwen2_moe, qwen3_moe, qwen3_next, glm4_moe, ernie4_5_moe, deepseek_v2, deepseek_v3 and glm4_moe_lite are not built") {
			t.Errorf("%s: %v", target, err)
		}
	}
	m, err := made(Options{LoRA: &LoRA{Rank: 2, Alpha: 2, Targets: []string{AllLinear}}})
	must(err)
	adapters := 0
	for _, g := range m.Groups() {
		for _, p := range g.Params {
			if p.isAdapter() {
				if adapters++; strings.Contains(p.Name, "experts") || strings.Contains(p.Name, "mlp.gate.") {
					t.Errorf("there is %s", p.Name)
				}
			}
		}
	}
	if adapters != 2*3*4 {
		t.Errorf("%d matrices of adapters", adapters)
	}
	m.Close()
	for _, pattern := range []string{"*.experts.2.*", "*.experts.*.gate_proj.weight"} {
		if _, err := made(Options{Freeze: []string{pattern}}); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), "freeze the matrices of all experts of a layer or of none") {
			t.Errorf("%s: %v", pattern, err)
		}
	}
	// Gradients of the other parameters do not depend on frozen ones.
	s := documents(cfg.VocabSize, 9, 13)
	whole := train(t, 1, cfg, s, nil)
	for _, pattern := range []string{"*.experts.*", "*.experts.*.down_proj.weight", "*.mlp.gate.weight"} {
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, int64(len(s.ids)), true)
			defer r.close()
			r.set(weights(r.Model))
			frozen, err := ParsePatterns([]string{pattern})
			must(err)
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if p.Frozen = frozen[0].MatchString(p.Name); p.Frozen {
						p.Grad = tensor.Tensor{}
					}
				}
			}
			if _, err := r.ForwardBackward(r.c, shard(c, s)); err != nil {
				return err
			}
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if !p.Frozen {
						for i, x := range p.Grad.View(p.Numel()).Float32s() {
							if float64(x) != whole.grads[p.Name][i] {
								t.Errorf("%s frozen: gradient of %s differs", pattern, p.Name)
								break
							}
						}
					}
				}
			}
			return nil
		})
	}
}

// Newer versions of transformers can save the matrices of all experts as two tensors. They are read
// as the same weights.
func TestStackedExperts(t *testing.T) {
	for _, name := range []string{"mixtral", "qwen3_moe"} {
		cfg := configs(t)[name]
		dir := t.TempDir()
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, 1, false)
			defer r.close()
			w := weights(r.Model)
			var items []tensor.Item
			add := func(name string, x []float32, shape ...int64) {
				items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(x, shape...)})
			}
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if !p.expert {
						add(strings.ReplaceAll(p.Name, ".block_sparse_moe.", ".mlp."), w[p.Name], p.Shape...)
					}
				}
			}
			for i, b := range r.blocks {
				x, ok := b.mlp.(*experts)
				if !ok {
					continue
				}
				var gateUp, down []float32
				for _, p := range x.gateUp.w {
					gateUp = append(gateUp, w[p.Name]...)
				}
				for _, p := range x.down.w {
					down = append(down, w[p.Name]...)
				}
				at := "model.layers." + string(rune('0'+i)) + ".mlp.experts."
				add(at+"gate_up_proj", gateUp, x.count, 2*x.width, x.hiddens)
				add(at+"down_proj", down, x.count, x.hiddens, x.width)
			}
			must(tensor.WriteSafetensors(filepath.Join(dir, weightsFile), nil, items))
			f, err := OpenWeights(dir, cfg)
			must(err)
			defer f.Close()
			must(f.Load(r.Model))
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if !slices.Equal(p.Value.View(p.Numel()).Float32s(), w[p.Name]) {
						t.Errorf("%s differs", p.Name)
					}
				}
			}
			// a stack of another shape is named as it is in the file
			items[len(items)-1].Tensor = items[len(items)-1].Tensor.View(items[len(items)-1].Tensor.Numel())
			must(tensor.WriteSafetensors(filepath.Join(dir, weightsFile), nil, items))
			if _, err := OpenWeights(dir, cfg); status.Of(err) != status.InvalidConfig ||
				!strings.Contains(err.Error(), "mlp.experts.down_proj") {
				t.Errorf("a flat stack: %v", err)
			}
			return nil
		})
	}
}

// A number of experts for which the names alone would fill the memory is refused. The largest
// published models have 2% of the limit.
func TestTooManyExperts(t *testing.T) {
	for _, x := range []struct {
		layers, experts int64
		refused         bool
	}{{1 << 14, 1 << 16, true}, {1 << 14, 1<<6 + 1, true}, {1 << 14, 1 << 6, false}, {94, 512, false}} {
		_, err := ConfigFromMap(small("qwen3_moe", map[string]any{"num_hidden_layers": x.layers,
			"num_experts": x.experts, "num_experts_per_tok": int64(1)}))
		want := fmt.Sprintf("num_hidden_layers = %d, num_experts = %d: ", x.layers, x.experts)
		refused := err != nil && strings.Contains(err.Error(), want)
		if refused != x.refused || !refused && err != nil {
			t.Errorf("%d layers with %d experts: %v", x.layers, x.experts, err)
		}
	}
}
