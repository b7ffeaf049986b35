package model

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// onRank runs f with a model on one rank whose weights are set.
func onRank(t *testing.T, cfg *Config, f func(r *rank)) {
	t.Helper()
	err := comm.RunLocal(1, func(c comm.Comm) error {
		r := newRank(c, cfg, 1, false)
		r.set(weights(r.Model))
		f(r)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// items returns a model's parameters for a file of the given type.
func items(m *Model, dtype tensor.DType) (all []tensor.Item) {
	for _, g := range m.Groups() {
		for _, p := range g.Params {
			x := p.Value
			if dtype == tensor.BF16 {
				b := make([]byte, 0, 2*p.Numel())
				for _, v := range p.Value.Float32s() {
					h := tensor.F32ToBF16(v)
					b = append(b, byte(h), byte(h>>8))
				}
				x = tensor.Of(unsafe.Pointer(&b[0]), tensor.BF16, p.Shape...)
			}
			all = append(all, tensor.Item{Name: p.Name, Tensor: x})
		}
	}
	return all
}

func writeFolder(t *testing.T, cfg *Config, files map[string][]tensor.Item) string {
	t.Helper()
	dir := t.TempDir()
	text, err := json.Marshal(cfg.fields())
	if err != nil {
		t.Fatal(err)
	}
	parts := map[string]string{}
	for name, list := range files {
		if err := tensor.WriteSafetensors(filepath.Join(dir, name), nil, list); err != nil {
			t.Fatal(err)
		}
		for _, it := range list {
			parts[it.Name] = name
		}
	}
	if files[weightsFile] == nil {
		index, _ := json.Marshal(map[string]any{"weight_map": parts})
		// a byte order mark, as some editors write it
		os.WriteFile(filepath.Join(dir, indexFile), append([]byte(input.BOM), index...), 0o600)
	}
	os.WriteFile(filepath.Join(dir, configFile), text, 0o600)
	return dir
}

// load opens a folder and loads it into a new model.
func load(t *testing.T, dir string, override map[string]any, then func(r *rank)) error {
	t.Helper()
	f, err := OpenFolder(dir, override)
	if err != nil {
		return err
	}
	defer f.Close()
	return comm.RunLocal(1, func(c comm.Comm) error {
		r := newRank(c, f.Config, 1, false)
		if err := f.Load(r.Model); err != nil {
			return err
		}
		if then != nil {
			then(r)
		}
		return nil
	})
}

// A folder is written where a symbolic link leads, also if nothing is there yet.
func TestSaveThroughLinks(t *testing.T) {
	for _, to := range []string{"new/model", "other"} {
		dir := t.TempDir()
		link, before := filepath.Join(dir, "link"), filepath.Join(dir, "before")
		must(errors.Join(os.Symlink(to, before), os.Symlink("before", link)))
		for range 2 {
			if err := WriteFolder(link, func(string) error { return nil }, nil); err != nil {
				t.Errorf("%s: %v", to, err)
			}
		}
		if _, err := os.Stat(filepath.Join(dir, to, weightsFile)); err != nil {
			t.Error(err)
		}
		if left := must1(os.ReadDir(dir)); len(left) != 3 {
			t.Errorf("%s: in the folder are %v", to, left)
		}
	}
}

// Save and Load are inverse, bitwise in F32, with the tokenizer's files. An existing folder is
// replaced completely.
func TestSaveAndLoad(t *testing.T) {
	each(t, func(t *testing.T, cfg *Config) {
		source, dir := t.TempDir(), filepath.Join(t.TempDir(), "new", "model")
		os.WriteFile(filepath.Join(source, "tokenizer.json"), []byte("{}"), 0o600)
		onRank(t, cfg, func(r *rank) {
			for range 2 {
				if err := r.Save(dir, Source{Base: source}, r.whole); err != nil {
					t.Fatal(err)
				}
				os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600)
				os.WriteFile(filepath.Join(dir, "model-00002-of-00003.safetensors"), nil, 0o600)
			}
			if err := r.Save(dir, Source{Base: source}, r.whole); err != nil {
				t.Fatal(err)
			}
			if left, _ := os.ReadDir(dir); len(left) != 4 {
				t.Errorf("in the folder: %v, want the user's notes and no stale weights", left)
			}
			if text, err := os.ReadFile(filepath.Join(dir, "tokenizer.json")); err != nil || string(text) != "{}" {
				t.Error(string(text), err)
			}
			if left, _ := os.ReadDir(filepath.Dir(dir)); len(left) != 1 {
				t.Errorf("files next to the folder: %v", left)
			}
			link := filepath.Join(t.TempDir(), "link")
			if err := errors.Join(os.Symlink(dir, link), r.Save(link, Source{Base: source}, r.whole)); err != nil {
				t.Error(err)
			}
			if to, err := os.Readlink(link); to != dir {
				t.Errorf("a link to the folder leads to %q, %v", to, err)
			}
			absent := filepath.Join(t.TempDir(), "absent")
			if err := errors.Join(os.Remove(link), os.Symlink(absent, link),
				r.Save(link, Source{Base: source}, r.whole)); err != nil {
				t.Error(err)
			}
			if left, _ := os.ReadDir(filepath.Dir(link)); len(left) != 1 {
				t.Errorf("files next to a link to a folder that does not exist: %v", left)
			}
			if names, err := FilesIn(absent); err != nil || len(names) < 2 {
				t.Errorf("a link to a folder that does not exist: %v in it, %v", names, err)
			}
			err := load(t, dir, nil, func(s *rank) {
				for i := range r.values {
					if !slices.Equal(r.values[i], s.values[i]) {
						t.Errorf("group %d differs", i)
					}
				}
				if a, b := *r.Config, *s.Config; !reflect.DeepEqual(a.Rope, b.Rope) || a.HeadDim != b.HeadDim ||
					a.TieWordEmbeddings != b.TieWordEmbeddings {
					t.Errorf("config %+v became %+v", a, b)
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	})
}

// Several files with an index load like one file, in any type. Save writes the type of the source.
func TestPartsAndTypes(t *testing.T) {
	cfg := configs(t)["qwen3"]
	onRank(t, cfg, func(r *rank) {
		all := items(r.Model, tensor.BF16)
		dir := writeFolder(t, cfg,
			map[string][]tensor.Item{"a-00001-of-00002.safetensors": all[:5], "a-00002-of-00002.safetensors": all[5:]})
		for _, want := range []tensor.DType{tensor.BF16, tensor.F32, tensor.F16} {
			override := map[string]any{"dtype": map[tensor.DType]string{tensor.F32: "float32",
				tensor.F16: "float16"}[want]}
			if want == tensor.BF16 {
				override = nil
			}
			err := load(t, dir, override, func(s *rank) {
				p, q := r.Groups()[1].Params[1], s.Groups()[1].Params[1]
				if v := tensor.BF16ToF32(tensor.F32ToBF16(p.Value.Float32s()[7])); q.Value.Float32s()[7] != v {
					t.Errorf("%v, want %v rounded", q.Value.Float32s()[7], v)
				}
				out := filepath.Join(t.TempDir(), "out")
				if err := s.Save(out, Source{Base: dir}, s.whole); err != nil {
					t.Fatal(err)
				}
				f, err := OpenFolder(out, nil)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				if e := f.where[q.Name].entry; e.DType != want || f.Config.DType != want && want != tensor.BF16 {
					t.Errorf("saved as %v, config %v, want %v", e, f.Config.DType, want)
				}
			})
			if err != nil {
				t.Error(err)
			}
		}
	})
}

func TestFolderFaults(t *testing.T) {
	cfg := configs(t)["llama"]
	tied := configs(t)["qwen2"]
	swap := func(change func(list []tensor.Item) []tensor.Item) func(t *testing.T, m *Model) string {
		return func(t *testing.T, m *Model) string {
			return writeFolder(t, m.Config, map[string][]tensor.Item{weightsFile: change(items(m, tensor.F32))})
		}
	}
	value := func(v float32) func(t *testing.T, m *Model) string {
		return func(t *testing.T, m *Model) string {
			m.Groups()[2].Params[1].Value.Float32s()[24+5] = v
			return swap(func(l []tensor.Item) []tensor.Item { return l })(t, m)
		}
	}
	extra := tensor.Item{Name: "extra.weight", Tensor: tensor.OfFloat32([]float32{1}, 1)}
	for name, c := range map[string]struct {
		cfg  *Config
		make func(t *testing.T, m *Model) string
		code status.Code
		want []string
	}{
		"missing": {cfg, swap(func(l []tensor.Item) []tensor.Item { return l[2:] }), status.InvalidConfig,
			[]string{"model.embed_tokens.weight[23 24] is missing",
				"model.layers.0.input_layernorm.weight[24] is missing"}},
		"unexpected": {cfg, swap(func(l []tensor.Item) []tensor.Item { return append(l, extra) }), status.InvalidConfig,
			[]string{"extra.weight F32[1] is not a parameter of a llama"}},
		"shape": {cfg, swap(func(l []tensor.Item) []tensor.Item {
			l[2].Tensor = l[2].Tensor.View(12, 48)
			return l
		}), status.InvalidConfig,
			[]string{
				"q_proj.weight is [12 48] in the file, config.json says [24 24] (num_attention_heads · head_dim, hidden_size)"}},
		"integers": {cfg, swap(func(l []tensor.Item) []tensor.Item {
			l[1].Tensor = tensor.OfInt32(make([]int32, 24), 24)
			return l
		}), status.InvalidConfig, []string{"input_layernorm.weight is I32"}},
		"nan": {cfg, value(float32(math.NaN())), status.Numeric,
			[]string{"model.layers.1.self_attn.q_proj.weight has NaN at [1 5]"}},
		"infinity": {cfg, value(float32(math.Inf(-1))), status.Numeric, []string{"-Inf at [1 5]"}},
		"no head": {cfg, swap(func(l []tensor.Item) []tensor.Item { return l[:len(l)-1] }), status.InvalidConfig,
			[]string{"lm_head.weight[23 24] is missing: set override tie_word_embeddings = true"}},
		"tied, differing": {tied, swap(func(l []tensor.Item) []tensor.Item {
			return append(l, tensor.Item{Name: tiedName, Tensor: tensor.OfFloat32(make([]float32, 23*24), 23, 24)})
		}), status.InvalidConfig, []string{"lm_head.weight F32[23, 24] differs", "tie_word_embeddings = false"}},
		"empty folder": {cfg, func(t *testing.T, _ *Model) string { return t.TempDir() }, status.IO,
			[]string{"no config.json here"}},
		"no weights": {cfg, func(t *testing.T, m *Model) string {
			dir := writeFolder(t, m.Config, nil)
			os.Remove(filepath.Join(dir, indexFile))
			os.WriteFile(filepath.Join(dir, "pytorch_model.bin"), nil, 0o600)
			return dir
		}, status.IO, []string{"weights are missing", "pytorch_model.bin is there: convert it"}},
		"no part": {cfg, func(t *testing.T, m *Model) string {
			all := items(m, tensor.F32)
			dir := writeFolder(t, m.Config,
				map[string][]tensor.Item{"a.safetensors": all[:4], "b.safetensors": all[4:]})
			os.Remove(filepath.Join(dir, "b.safetensors"))
			return dir
		}, status.IO, []string{"b.safetensors: no such file"}},
		"index outside": {cfg, func(t *testing.T, m *Model) string {
			dir := writeFolder(t, m.Config, nil)
			os.WriteFile(filepath.Join(dir, indexFile), []byte(`{"weight_map": {"a": "../a.safetensors"}}`), 0o600)
			return dir
		}, status.InvalidConfig, []string{"only files in the folder itself"}},
		"index disagrees": {cfg, func(t *testing.T, m *Model) string {
			all := items(m, tensor.F32)
			dir := writeFolder(t, m.Config, map[string][]tensor.Item{"a.safetensors": all})
			os.WriteFile(filepath.Join(dir, indexFile), []byte(`{"weight_map": {"b": "a.safetensors"}}`), 0o600)
			return dir
		}, status.InvalidConfig, []string{"tensor b is not in a.safetensors"}},
		"broken index": {cfg, func(t *testing.T, m *Model) string {
			dir := writeFolder(t, m.Config, nil)
			os.WriteFile(filepath.Join(dir, indexFile), []byte(`{"weight`), 0o600)
			return dir
		}, status.InvalidConfig, []string{"no usable weight_map"}},
	} {
		t.Run(name, func(t *testing.T) {
			onRank(t, c.cfg, func(r *rank) {
				err := load(t, c.make(t, r.Model), nil, nil)
				if status.Of(err) != c.code {
					t.Fatalf("%v of %v, want %v", status.Of(err), err, c.code)
				}
				for _, want := range c.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%v\nwant %q", err, want)
					}
				}
			})
		})
	}
}

// A second, equal copy of tied weights and buffers of old versions are no faults.
func TestFolderTolerates(t *testing.T) {
	cfg := configs(t)["qwen2"]
	onRank(t, cfg, func(r *rank) {
		list := items(r.Model, tensor.F32)
		list = append(list, tensor.Item{Name: tiedName, Tensor: list[0].Tensor},
			tensor.Item{Name: "model.layers.0.self_attn.rotary_emb.inv_freq",
				Tensor: tensor.OfFloat32([]float32{1}, 1)})
		if err := load(t, writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: list}), nil, nil); err != nil {
			t.Error(err)
		}
	})
}

// Tied weights may be in the files under the name of the head alone.
func TestFolderWithTiedHead(t *testing.T) {
	cfg := configs(t)["qwen2"]
	onRank(t, cfg, func(r *rank) {
		list := items(r.Model, tensor.F32)
		list[0].Name = tiedName
		for _, files := range []map[string][]tensor.Item{{weightsFile: list},
			{"a.safetensors": list[:2], "b.safetensors": list[2:]}} {
			err := load(t, writeFolder(t, cfg, files), nil, func(other *rank) {
				if got := other.Groups()[0].Params[0]; !slices.Equal(got.Value.Float32s(), list[0].Tensor.Float32s()) {
					t.Errorf("%s differs", got.Name)
				}
			})
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// From a folder of a model with vision, only the language model is loaded, whose tensors have other
// names there. It is saved as a model without vision.
func TestFolderWithVision(t *testing.T) {
	for _, x := range []struct {
		config, outer  string
		names, dropped []string // prefixes: the name here, the name in the folder; of further tensors
	}{
		{"qwen3_5", "qwen3_5", []string{"model.", "model.language_model."}, []string{"model.visual.", "mtp."}},
		{"gemma3", "gemma3", []string{"model.", "model.language_model."},
			[]string{"model.vision_tower.", "model.multi_modal_projector."}},
		{"mistral", "mistral3", []string{"model.", "language_model.model."},
			[]string{"vision_tower.", "multi_modal_projector."}},
		{"ministral3", "mistral3", []string{"model.", "language_model.model."},
			[]string{"vision_tower.", "multi_modal_projector."}},
		{"gemma3", "gemma3", []string{"model.", "language_model.model."},
			[]string{"vision_tower.", "multi_modal_projector."}},
	} {
		t.Run(x.outer+" "+x.names[1], func(t *testing.T) {
			cfg := configs(t)[x.config]
			onRank(t, cfg, func(r *rank) {
				list := items(r.Model, tensor.F32)
				for i, item := range list {
					if rest, ok := strings.CutPrefix(item.Name, x.names[0]); ok {
						list[i].Name = x.names[1] + rest
					}
				}
				for _, prefix := range x.dropped {
					list = append(list,
						tensor.Item{Name: prefix + "odd.weight", Tensor: tensor.OfFloat32([]float32{1}, 1)})
				}
				dir := writeFolder(t, cfg,
					map[string][]tensor.Item{"a.safetensors": list[:5], "b.safetensors": list[5:]})
				text := must1(
					json.Marshal(map[string]any{"model_type": x.outer, "vision_config": map[string]any{"depth": 1},
						"text_config": cfg.fields()}))
				must(os.WriteFile(filepath.Join(dir, configFile), text, 0o600))
				f := must1(OpenFolder(dir, nil))
				var dropped []string
				for _, d := range f.Dropped() {
					if dropped = append(dropped, d.Prefix); d.Tensors != 1 || d.Bytes != 4 {
						t.Errorf("dropped %+v", d)
					}
				}
				if f.HasVision() != (x.outer != "qwen3_5") { // of which AutoModelForCausalLM loads the text model
					t.Errorf("loaded with vision: %v", f.HasVision())
				}
				if f.Close(); !slices.Equal(slices.Sorted(slices.Values(dropped)),
					slices.Sorted(slices.Values(x.dropped))) {
					t.Errorf("dropped %v, want %v", dropped, x.dropped)
				}
				loadedAsText(t, r, dir)
				// In other models such names are not known.
				must(os.WriteFile(filepath.Join(dir, configFile), must1(json.Marshal(configs(t)["qwen3"].fields())),
					0o600))
				if err := load(t, dir, nil, nil); status.Of(err) != status.InvalidConfig ||
					!strings.Contains(err.Error(), "model.layers.0.input_layernorm.weight[24] is missing") {
					t.Errorf("qwen3: %v", err)
				}
			})
		})
	}
}

// loadedAsText loads and saves a folder, and loads what was saved. Its weights are equal to r's.
func loadedAsText(t *testing.T, r *rank, dir string) {
	saved := filepath.Join(t.TempDir(), "model")
	same := func(got *rank) {
		for i, g := range got.Groups() {
			for j, p := range g.Params {
				if want := r.Groups()[i].Params[j]; p.Name != want.Name ||
					!slices.Equal(p.Value.View(p.Numel()).Float32s(), want.Value.View(p.Numel()).Float32s()) {
					t.Errorf("%s differs from %s", p.Name, want.Name)
				}
			}
		}
	}
	if err := load(t, dir, nil, func(got *rank) {
		same(got)
		must(got.Save(saved, Source{Base: dir}, got.whole))
	}); err != nil {
		t.Fatal(err)
	}
	if err := load(t, saved, nil, same); err != nil {
		t.Error(err)
	}
}

func must1[T any](x T, err error) T {
	must(err)
	return x
}

// A folder's files that are not of a model stay when the model is replaced, whatever their names
// resemble: data sets in .bin and .safetensors files, and folders.
func TestSaveKeepsOtherFiles(t *testing.T) {
	onRank(t, configs(t)["llama"], func(r *rank) {
		dir := t.TempDir()
		own := []string{"corpus.bin", "corpus.idx", "eval.safetensors", "model_eval.safetensors",
			"notes.safetensors.md", "runs.bin/a", "model.safetensors.d/a"}
		stale := []string{"model-00001-of-00002.safetensors", "model.safetensors-00001-of-00002.safetensors",
			"model.fp16.safetensors", "model.safetensors.index.json",
			"model.safetensors.index.fp16.json", "consolidated.safetensors", "pytorch_model.bin",
			"pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
			"adapter_model.bin", "adapter_model.safetensors", "adapter_config.json", "tokenizer.json",
			"additional_chat_templates/old.jinja"}
		for _, name := range slices.Concat(own, stale) {
			path := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777),
				os.WriteFile(path, []byte(name), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		first := map[string]bool{} // names in the folder
		for _, name := range stale {
			first[strings.Split(name, "/")[0]] = true
		}
		if used, err := FilesIn(dir); err != nil || !slices.Equal(used, slices.Sorted(maps.Keys(first))) {
			t.Errorf("files of a model: %v, %v", used, err)
		}
		source := Source{Templates: map[string]string{"default": "D", "tool_use": "T"}}
		if err := r.Save(dir, source, r.whole); err != nil {
			t.Fatal(err)
		}
		if got, err := readTemplates(dir); err != nil || !maps.Equal(got, source.Templates) {
			t.Errorf("chat templates %q, %v", got, err)
		}
		for _, name := range own {
			if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(text) != name {
				t.Errorf("%s: %q, %v", name, text, err)
			}
		}
		for _, name := range stale {
			if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
				t.Errorf("%s of the replaced model is still there", name)
			}
		}
	})
}

// If a folder cannot be written, no file remains and the error says what to do.
func TestSaveFaults(t *testing.T) {
	onRank(t, configs(t)["llama"], func(r *rank) {
		dir := t.TempDir()
		file := filepath.Join(dir, "file")
		os.WriteFile(file, nil, 0o600)
		if err := r.Save(filepath.Join(file, "model"), Source{}, r.whole); status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "choose an output folder") {
			t.Error(err)
		}
		if err := r.Save(file, Source{}, r.whole); status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "is a file") {
			t.Error(err)
		}
		p := r.Groups()[0].Params[0]
		p.stored = tensor.F16
		p.Value.Float32s()[3] = 1e6
		if err := r.Save(filepath.Join(dir, "model"), Source{}, r.whole); err == nil ||
			!strings.Contains(err.Error(), "1e+06 at [0 3] is too large for F16") {
			t.Error(err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 1 {
			t.Errorf("files that remain: %v", left)
		}
	})
}

// Every F16 value stays the same when it is converted to F32 and back. Rounding is to nearest, ties
// to even.
func TestHalf(t *testing.T) {
	for h := range 1 << 16 {
		f := tensor.F16ToF32(uint16(h))
		if got := f32ToF16(f); got != uint16(h) && f == f {
			t.Fatalf("%04x is %v is %04x", h, f, got)
		}
		if next := tensor.F16ToF32(uint16(h) + 1); f == f && next == next && h&0x7fff < 0x7bff {
			middle := float32((float64(f) + float64(next)) / 2)
			even := uint16(h + h&1)
			if got := f32ToF16(middle); got != even {
				t.Fatalf("between %04x and its neighbour: %04x", h, got)
			}
			if got := f32ToF16(math.Nextafter32(middle, f)); got != uint16(h) {
				t.Fatalf("below the middle above %04x: %04x", h, got)
			}
		}
	}
}
