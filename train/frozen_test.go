package train

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// Lists of frozen parameters: whole groups, some of the matrices that are one product, norms, a
// tied table.
var freezes = map[string][]string{
	"embedding and a layer": {"model.embed_tokens.weight", "model.layers.0.*"},
	"k, norms":              {"*.k_proj.weight", "*norm.weight"},
	"matrices":              {"re:.*(proj|embed_tokens).*weight"},
	"all but the MLP":       {"*n.*", "*norm*", "*embed*"},
}

func init() {
	common := map[string]any{"vocab_size": 256, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
		"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.1}
	for name, more := range map[string]map[string]any{
		"qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 8, "full_attention_interval": 2,
			"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
			"linear_value_head_dim": 9, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5},
		"gemma2": {"model_type": "gemma2", "head_dim": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0,
			"final_logit_softcapping": 4.0},
		"gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 0, "head_dim": 10, "sliding_window": 5},
	} {
		maps.Copy(more, common)
		tiny[name] = more
	}
}

// After five steps with frozen parameters, every mesh, ZeRO stage and policy gives the weights of
// one rank. Planned memory is used exactly, and the bytes sent equal the formulas; run.with checks
// both.
func TestFrozen(t *testing.T) {
	for _, name := range []string{"llama", "qwen3"} {
		for list, freeze := range freezes {
			one := run{model: name, ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 5,
				freeze: freeze}
			want := one.train(t)
			for i, mesh := range [][2]int{{2, 2}, {2, 1}, {4, 2}} {
				for zero := range 4 {
					x := one
					x.ranks, x.ulysses, x.zero = mesh[0], mesh[1], zero
					if (i+zero)%2 == 0 {
						x.memory = MemoryConfig{BlockInput: "offload", Attention: "recompute", QKV: "recompute",
							MLP: "recompute"}
					}
					got := x.train(t)
					x.near(t, got, want, 1e-5)
					if d := furthest(got.weights, want.weights); !(d <= lastBit) {
						t.Errorf("%s, %+v: the weights differ by %.2g", list, x, d)
					}
				}
			}
		}
	}
}

// firstStep returns the gradients of the first step of one rank, and the names of the parameters.
func firstStep(t *testing.T, x run) map[string][]float32 {
	t.Helper()
	all := map[string][]float32{}
	x.steps, x.ranks, x.ulysses = 1, 1, 1
	x.seen = func(m *model.Model) {
		for _, g := range model.Halves(m.Groups(), false) {
			for _, p := range g.Params {
				all[p.Name] = slices.Clone(p.Grad.View(p.Numel()).Float32s())
			}
		}
	}
	x.train(t)
	return all
}

// Gradients of trained parameters do not depend on what is frozen.
func TestFrozenGradients(t *testing.T) {
	for _, name := range []string{"llama", "qwen3", "qwen3_5", "gemma2", "gpt_oss"} {
		x := run{model: name, optimizer: "sgd", compute: tensor.F32}
		want := firstStep(t, x)
		for list, freeze := range freezes {
			x.freeze = freeze
			got := firstStep(t, x)
			if len(got) == 0 || len(got) >= len(want) {
				t.Errorf("%s, %s: %d gradients of %d", name, list, len(got), len(want))
			}
			for p, g := range got {
				if d := furthest(g, want[p]); !(d <= 2e-6) {
					t.Errorf("%s, %s: the gradient of %s differs by %.2g", name, list, p, d)
				}
			}
		}
	}
}

// Frozen weights are stored once in the compute type, without gradients, masters and moments.
func TestFrozenMemory(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	for zero := range 4 {
		for _, compute := range []tensor.DType{tensor.F32, tensor.BF16} {
			x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: compute, steps: 3, zero: zero,
				on: &late, freeze: []string{`re:.*(embed|norm|k_proj|v_proj|o_proj|gate|up|lm_head|bias).*`}}
			o := x.train(t)
			cfg, err := model.ConfigFromMap(tiny["llama"])
			if err != nil {
				t.Fatal(err)
			}
			q, down := cfg.NumAttentionHeads*cfg.HeadDim*cfg.HiddenSize, cfg.HiddenSize*cfg.IntermediateSize
			layer := q + down
			trained := cfg.NumHiddenLayers * layer
			frozen := o.numel - trained
			own := trained
			if zero > 0 {
				own /= 2
			}
			want := map[string]int64{"first moments": 4 * own, "second moments": 4 * own, "gradients": 4 * trained,
				"frozen weights": compute.Size() * frozen}
			if compute == tensor.BF16 {
				want["master weights"] = 4 * own
			}
			if zero > 1 {
				want["gradients"] = 4 * own
			}
			for _, c := range o.table {
				name := strings.TrimSuffix(c.Name, ", shard")
				if n, ok := want[name]; ok && (zero < 3 || name != "frozen weights") {
					if c.Bytes != n {
						t.Errorf("zero %d, %v: %s has %d bytes, want %d", zero, compute, c.Name, c.Bytes, n)
					}
					delete(want, name)
				}
			}
			if zero < 3 && len(want) > 0 || len(want) > 1 {
				t.Errorf("zero %d, %v: no %v in the table %v", zero, compute, want, o.table)
			}
		}
	}
}

// alone runs on one rank, and returns its error.
func (x run) alone(dataset *data.Config) (o outcome, err error) {
	x.ranks, x.ulysses = 1, 1
	err = comm.RunLocal(1, func(c comm.Comm) (err error) {
		o, err = x.rank(c, dataset)
		return err
	})
	return o, err
}

// A list that freezes everything and a pattern without a match are refused.
func TestFreezeIsRefused(t *testing.T) {
	for pattern, text := range map[string]string{"*": "all parameters of the model are frozen",
		"model.layers.9.*": `"model.layers.9.*" matches no parameter`, "re:(": "is not a regular expression"} {
		x := run{model: "llama", ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 1,
			freeze: []string{"*.q_proj.weight", pattern}}
		dataset := ignoredData(t)
		_, err := x.alone(&dataset)
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want an error with %q", pattern, err, text)
		}
	}
}

// A checkpoint has the trained parameters alone, and a run resumes from it with equal weights.
func TestFrozenResume(t *testing.T) {
	for _, zero := range []int{0, 3} {
		x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.F32, steps: 4, zero: zero,
			freeze: freezes["k, norms"]}
		want := x.train(t)
		x.keep = &Checkpoints{Dir: t.TempDir(), Keep: 1, Model: func(string) error { return nil }}
		x.stop = true
		x.train(t)
		x.stop, x.resume = false, true
		got := x.train(t)
		if d := furthest(got.weights, want.weights); d != 0 {
			t.Errorf("zero %d: the weights of the resumed run differ by %.2g", zero, d)
		}
		x.freeze = append(slices.Clone(x.freeze), "*.v_proj.weight")
		dataset := ignoredData(t)
		if _, err := x.alone(&dataset); err == nil || !strings.Contains(err.Error(), "parameters") {
			t.Errorf("zero %d: another list of frozen parameters: %v", zero, err)
		}
	}
}

// Offloaded states and gradients of a model with frozen parameters, or with adapters, give bitwise
// the results of states on the device. The streams of the devices run in random order.
func TestFrozenOffloaded(t *testing.T) {
	offloads := []Offload{{Step: StepStreamed, Bucket: 1000}, {Step: StepOnHost, Bucket: 1000, Host: hostStepper{}},
		{Step: StepStreamed, Bucket: 1000, Gradients: true},
		{Step: StepOnHost, Bucket: 1000, Host: hostStepper{}, Gradients: true}}
	for i, x := range []run{
		{ranks: 1, ulysses: 1, freeze: freezes["k, norms"]},
		{ranks: 2, ulysses: 2, zero: 2, freeze: freezes["embedding and a layer"]},
		{ranks: 4, ulysses: 2, zero: 3, freeze: freezes["matrices"]},
		{ranks: 2, ulysses: 1, zero: 3, lora: &model.LoRA{Rank: 3, Alpha: 7, Targets: []string{model.AllLinear}}},
	} {
		x.model, x.steps, x.optimizer, x.compute = "llama", 3, "adamw", tensor.BF16
		want, err := x.onFake(t, uint64(100*i), fake.Options{})
		if err != nil {
			t.Fatal(err)
		}
		for k, o := range offloads {
			x.offload = o
			got, err := x.onFake(t, uint64(100*i+10*k+10), fake.Options{})
			if err != nil {
				t.Fatalf("%+v: %v", x, err)
			}
			if !slices.Equal(got.losses, want.losses) || !slices.Equal(got.weights, want.weights) {
				t.Errorf("%+v: losses %v, on the device %v", x, got.losses, want.losses)
			}
		}
	}
}
