package train

import (
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/gdn"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// With overlapped projections, q, k and v take their rows of the adapter that they share if the
// files of the model have them in one matrix. The results are equal to the results of one rank,
// which does not overlap.
func TestLoRAOfFusedProjections(t *testing.T) {
	tiny["phi3"] = maps.Clone(tiny["llama"])
	tiny["phi3"]["model_type"], tiny["phi3"]["pad_token_id"] = "phi3", 0
	delete(tiny["phi3"], "mlp_bias")
	defer delete(tiny, "phi3")
	x := run{model: "phi3", ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 3, lr: 0.3,
		lora: &model.LoRA{Rank: 3, Alpha: 7, Targets: []string{"qkv_proj"}}}
	want := x.train(t)
	if !(want.losses[2] < want.losses[0]) {
		t.Errorf("the loss does not decrease: %v", want.losses)
	}
	x.ranks, x.ulysses, x.overlap = 2, 2, true
	got := x.train(t)
	x.near(t, got, want, 1e-5)
	if d := furthest(got.weights, want.weights); !(d <= 2e-5*largest(want.weights)) {
		t.Errorf("the weights differ by %.2g", d)
	}
}

// Three steps that train adapters give the weights of one rank on every mesh, with every ZeRO stage
// and policy of activations, and with tiles. Planned memory is used exactly.
func TestLoRATable(t *testing.T) {
	for _, name := range []string{"llama", "qwen3_5"} {
		lora := &model.LoRA{Rank: 3, Alpha: 7, Targets: []string{model.AllLinear}}
		if name == "qwen3_5" {
			lora.Dropout = 0.2
		}
		one := run{model: name, ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 3,
			lora: lora, lr: 0.3}
		want := one.train(t)
		if !(want.losses[2] < want.losses[0]) {
			t.Errorf("%s: the loss does not decrease: %v", name, want.losses)
		}
		for i, mesh := range [][3]int{{2, 2, 1}, {2, 1, 1}, {4, 2, 1}, {4, 1, 2}, {4, 2, 2}} {
			for zero := range 4 {
				x := one
				x.ranks, x.ulysses, x.ring, x.zero = mesh[0], mesh[1], mesh[2], zero
				switch (i + zero) % 3 {
				case 0:
					x.memory = MemoryConfig{BlockInput: "recompute", Attention: "recompute", QKV: "recompute",
						MLP: "recompute"}
				case 1:
					x.tiles = model.Tiles{MLP: 5, Loss: 7}
					x.memory = MemoryConfig{BlockInput: "offload", Attention: "keep", QKV: "recompute", MLP: "keep"}
				}
				if name == "qwen3_5" && i%2 == 1 {
					x.strategy = gdn.State
				}
				got := x.train(t)
				x.near(t, got, want, 1e-5)
				if d := furthest(got.weights, want.weights); !(d <= 2e-5*largest(want.weights)) {
					t.Errorf("%+v: the weights differ by %.2g", x, d)
				}
			}
		}
	}
}

// Adapters of a shared expert, whose layer divides the other experts among ranks, fit into the
// planned memory, with and without tiles. One rank has the same losses.
func TestLoRAOfSharedExperts(t *testing.T) {
	onGPU := devicetest.CUDA(t, "cuda", false)
	one := run{model: "shared", ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 2,
		lora: &model.LoRA{Rank: 16, Alpha: 7, Targets: []string{model.AllLinear}}, tiles: model.Tiles{Loss: 4}}
	want := one.train(t)
	for _, tile := range []int64{0, 5} {
		x := one
		x.ranks, x.ulysses, x.experts, x.tiles.MLP = 2, 2, 2, tile
		x.near(t, x.train(t), want, 1e-5)
		x.on = &onGPU // whose attention needs less memory, so that the experts need the most
		x.near(t, x.train(t), want, 1e-4)
	}
}

// The CUDA plug-in trains adapters, in F32 with the losses of the CPU.
func TestLoRAOnThePlugin(t *testing.T) {
	onGPU := devicetest.CUDA(t, "cuda", false)
	for _, name := range []string{"llama", "qwen3_5"} {
		x := run{model: name, ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.F32, steps: 4,
			lora: &model.LoRA{Rank: 3, Alpha: 7, Dropout: 0.1, Targets: []string{model.AllLinear}}}
		want := x.train(t)
		x.on = &onGPU
		x.near(t, x.train(t), want, 1e-4)
		x.ranks, x.ulysses, x.zero, x.compute = 2, 2, 3, tensor.BF16
		x.near(t, x.train(t), want, 0)
	}
}

// largest returns the largest absolute value.
func largest(x []float32) float64 { return furthest(x, make([]float32, len(x))) }

// The first loss with adapters is bitwise that of the model without, in F32 and in BF16.
func TestLoRABegins(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	for _, compute := range []tensor.DType{tensor.F32, tensor.BF16} {
		for zero := range 4 {
			x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: compute, steps: 3, zero: zero,
				on: &late}
			want := x.train(t).losses
			x.lora = &model.LoRA{Rank: 4, Alpha: 8, Targets: []string{"q_proj", "down_proj"}, RSLoRA: true}
			got := x.train(t)
			if math.Float64bits(got.losses[0]) != math.Float64bits(want[0]) || got.losses[1] == want[1] {
				t.Errorf("zero %d, %v: losses %v, without adapters %v", zero, compute, got.losses, want)
			}
			rank, masters := int64(4), int64(0)
			cfg, err := model.ConfigFromMap(tiny["llama"])
			if err != nil {
				t.Fatal(err)
			}
			n := cfg.NumHiddenLayers * rank * (cfg.HiddenSize + cfg.NumAttentionHeads*cfg.HeadDim + cfg.HiddenSize +
				cfg.IntermediateSize)
			if int64(len(got.weights)) != n {
				t.Errorf("%d trained parameters, want %d", len(got.weights), n)
			}
			for _, c := range got.table {
				if c.Name == "master weights" || c.Name == "master weights, shard" {
					masters = c.Bytes
				}
			}
			if want := n * 4 / int64(1+min(zero, 1)); compute == tensor.BF16 && masters != want {
				t.Errorf("zero %d: master weights of %d bytes, want %d", zero, masters, want)
			}
		}
	}
}

// The base model of a folder of PEFT is a folder. Without one, as if PEFT got the name of a model
// of the hub, the error names the field to set.
func TestMergeWithoutABaseModel(t *testing.T) {
	for base, shown := range map[string]string{`"Qwen/Qwen3-0.6B"`: `"Qwen/Qwen3-0.6B"`, `""`: `""`, "null": `""`} {
		dir := t.TempDir()
		text := `{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": ` + base + `}`
		err := errors.Join(os.WriteFile(filepath.Join(dir, model.AdapterConfigFile), []byte(text), 0o600),
			tensor.WriteSafetensors(filepath.Join(dir, "adapter_model.safetensors"), nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		err = MergeAdapters(dir, filepath.Join(t.TempDir(), "merged"), false)
		want := "adapter_config.json: base_model_name_or_path = " + shown + " is not a folder here; set it to"
		if status.Of(err) != status.IO || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", base, err)
		}
	}
}
