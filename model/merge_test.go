package model

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// adapterFolder writes a folder of PEFT with an adapter of rank 1 of a matrix [out, in], all 0.
// more has further fields of its configuration.
func adapterFolder(t *testing.T, name string, out, in int64, more map[string]any) string {
	t.Helper()
	dir := t.TempDir()
	fields := map[string]any{"peft_type": "LORA", "r": 1, "lora_alpha": 1}
	maps.Copy(fields, more)
	text := must1(json.Marshal(fields))
	must(os.WriteFile(filepath.Join(dir, AdapterConfigFile), text, 0o600))
	zeros := func(suffix string, shape ...int64) tensor.Item {
		n := shape[0] * shape[1]
		return tensor.Item{Name: adapterPrefix + module(name) + suffix,
			Tensor: tensor.OfFloat32(make([]float32, n), n).View(shape...)}
	}
	must(tensor.WriteSafetensors(filepath.Join(dir, adapterFile), nil,
		[]tensor.Item{zeros(loraA, 1, in), zeros(loraB, out, 1)}))
	return dir
}

// A merge refuses a base model whose weights do not fit its config.json, as a run does.
func TestMergeChecksTheBaseModel(t *testing.T) {
	for name, changed := range map[string]string{"qwen3": "self_attn.q_norm.weight", "glm4": "self_attn.k_proj.bias"} {
		cfg := configs(t)[name]
		onRank(t, cfg, func(r *rank) {
			all := items(r.Model, tensor.F32)
			isChanged := func(x tensor.Item) bool { return strings.HasSuffix(x.Name, changed) }
			first := slices.IndexFunc(all, isChanged)
			none := slices.Clone(all)
			none[first].Tensor = tensor.OfFloat32(nil, 0)
			merged := func(weights []tensor.Item) error {
				f := must1(OpenAdapters(adapterFolder(t, "model.layers.0.self_attn.o_proj.weight", cfg.HiddenSize,
					cfg.NumAttentionHeads*cfg.HeadDim, nil)))
				defer f.Close()
				base := must1(OpenFolder(writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: weights}), nil))
				defer base.Close()
				return MergeFolder(filepath.Join(t.TempDir(), "merged"), f, base)
			}
			if name == "qwen3" { // writeFolder has the matrices of other families as the program has them
				if err := merged(all); err != nil {
					t.Error(err)
				}
			}
			lacking := slices.DeleteFunc(slices.Clone(all), isChanged)
			for what, weights := range map[string][]tensor.Item{" is missing": lacking, " is [0] in the file": none} {
				err := merged(weights)
				if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), changed) ||
					!strings.Contains(err.Error(), what) || !strings.HasPrefix(err.Error(), "export: ") {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}

// A use_rslora that is neither true nor false is refused: it changes the scale of the adapters.
func TestAdaptersWithAnUnclearScale(t *testing.T) {
	for _, x := range []struct {
		value any
		scale float64
	}{{true, 3}, {false, 1.5}, {nil, 1.5}, {"true", 0}, {1, 0}} {
		l, err := ReadAdapterConfig(adapterFolder(t, "model.layers.0.self_attn.q_proj.weight", 4, 4,
			map[string]any{"r": 4, "lora_alpha": 6, "use_rslora": x.value}))
		if refused := err != nil && strings.Contains(err.Error(), "use_rslora = "); refused != (x.scale == 0) ||
			!refused && (err != nil || l.Scale() != x.scale) {
			t.Errorf("%v: scale %v, %v", x.value, l.Scale(), err)
		}
	}
}
