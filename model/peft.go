package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/tensor"
)

const (
	// AdapterConfigFile is the name of the configuration in a folder of PEFT.
	AdapterConfigFile = "adapter_config.json"

	adapterFile   = "adapter_model.safetensors"
	adapterPrefix = "base_model.model." // of the names of tensors
)

// AdapterFolder is a folder of PEFT with LoRA adapters: adapter_config.json and
// adapter_model.safetensors.
type AdapterFolder struct {
	Dir  string
	LoRA LoRA
	Base string // base_model_name_or_path; "" = not given

	file *tensor.Safetensors
}

// OpenAdapters reads adapter_config.json and the header of the adapters' file. A setting that is
// not built is refused by name.
func OpenAdapters(dir string) (*AdapterFolder, error) {
	l, base, err := readAdapterConfig(dir)
	if err != nil {
		return nil, err
	}
	file, err := tensor.OpenSafetensors(filepath.Join(dir, adapterFile))
	if err != nil {
		return nil, err
	}
	f := &AdapterFolder{Dir: dir, LoRA: l, Base: base, file: file}
	if len(l.Targets) == 0 {
		f.LoRA.Targets = f.modules()
	}
	return f, nil
}

// modules returns the names of the modules that have adapters.
func (f *AdapterFolder) modules() []string {
	var paths []string
	for _, e := range f.file.Entries() {
		if path, ok := strings.CutSuffix(e.Name, loraA); ok {
			paths = append(paths, path)
		}
	}
	return moduleNames(paths)
}

// moduleNames returns the names of modules, such as q_proj, from their paths: sorted, each once.
func moduleNames(paths []string) (names []string) {
	for _, path := range paths {
		names = append(names, path[strings.LastIndex(path, ".")+1:])
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Close closes the file.
func (f *AdapterFolder) Close() { f.file.Close() }

// Files returns the files of the folder, so that ranks can compare their copies.
func (f *AdapterFolder) Files() []comm.File {
	return []comm.File{{Name: AdapterConfigFile, Path: filepath.Join(f.Dir, AdapterConfigFile)},
		comm.SafetensorsFile(adapterFile, f.file)}
}

// idleKeys are keys of adapter_config.json that change nothing, or that tensors and other keys
// repeat.
var idleKeys = []string{"peft_version", "revision", "task_type", "inference_mode", "auto_mapping", "lora_dropout",
	"megatron_core", "qalora_group_size",
	"base_model_name_or_path", "peft_type", "r", "lora_alpha", "use_rslora", "target_modules"}

// readAdapterConfig reads adapter_config.json.
func readAdapterConfig(dir string) (l LoRA, base string, err error) {
	path := filepath.Join(dir, AdapterConfigFile)
	fail := func(format string, args ...any) (LoRA, string, error) {
		return l, "", status.Errorf(status.InvalidConfig, "%s: %w", path, fmt.Errorf(format, args...))
	}
	text, err := input.Read(path, input.MaxConfig)
	if err != nil {
		return l, "", status.Errorf(status.IO, "%s: %w; name a folder that PEFT has saved", dir, err)
	}
	var raw map[string]any
	if err := input.JSON(input.TrimBOM(text), &raw); err != nil {
		return fail("%v; the file is damaged", err)
	}
	number := func(key string) (float64, bool) { x, ok := raw[key].(float64); return x, ok }
	if kind, _ := raw["peft_type"].(string); kind != "LORA" {
		return fail("peft_type is %v, and only \"LORA\" is built; name a folder with LoRA adapters", raw["peft_type"])
	}
	rank, ok := number("r")
	if !ok || rank < 1 || rank > 1<<20 || rank != float64(int64(rank)) {
		return fail("r = %v is not a rank; correct it", raw["r"])
	}
	if l.Alpha, ok = number("lora_alpha"); !ok {
		return fail("lora_alpha = %v is not a number; correct it", raw["lora_alpha"])
	}
	l.Rank = int64(rank)
	if l.RSLoRA, ok = raw["use_rslora"].(bool); !ok && raw["use_rslora"] != nil {
		return fail("use_rslora = %v is not true or false; correct it", raw["use_rslora"])
	}
	switch targets := raw["target_modules"].(type) {
	case string: // or a regular expression, for which OpenAdapters reads the names from the tensors
		if targets == AllLinear {
			l.Targets = []string{targets}
		}
	case []any:
		for _, t := range targets {
			name, _ := t.(string)
			l.Targets = append(l.Targets, name)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(raw)) {
		if !slices.Contains(idleKeys, key) && !isUnset(key, raw[key]) {
			value, _ := json.Marshal(raw[key])
			return l, "", status.Errorf(status.Unsupported, "%s: %s = %s: %s", path, input.Short(key),
				input.Short(string(value)), notbuilt.Adapters.Text("save adapters without it"))
		}
	}
	base, _ = raw["base_model_name_or_path"].(string)
	return l, base, nil
}

// isUnset reports whether a value in adapter_config.json turns a setting off. An initialization by
// the matrices of the base model, such as PiSSA, changes these matrices as well: the adapters are
// of a base model that only PEFT can make again.
func isUnset(key string, value any) bool {
	switch x := value.(type) {
	case nil:
		return true
	case bool:
		return !x || key == "init_lora_weights"
	case string:
		return key == "bias" && x == "none" || key == "init_lora_weights" && x == "gaussian"
	case map[string]any:
		return len(x) == 0
	case []any:
		return len(x) == 0
	}
	return false
}

// adapted returns the paths in the files of the modules that have an adapter, in the order of the
// layers.
func (m *Model) adapted() (paths []string) {
	for _, g := range m.groups {
		for _, p := range g.Params {
			if path, ok := strings.CutSuffix(p.Name, loraA); ok {
				paths = append(paths, path)
			}
		}
	}
	return paths
}

// adapterConfig returns the text of adapter_config.json for the adapters of the model. base is the
// folder of the base model.
func (m *Model) adapterConfig(base string) ([]byte, error) {
	l := m.lora
	targets := l.Targets
	if slices.Contains(targets, AllLinear) {
		targets = moduleNames(m.adapted())
	}
	text, err := json.MarshalIndent(map[string]any{
		"alpha_pattern": map[string]any{}, "auto_mapping": nil, "base_model_name_or_path": base, "bias": "none",
		"exclude_modules": nil, "fan_in_fan_out": false,
		"inference_mode": true, "init_lora_weights": true, "layer_replication": nil, "layers_pattern": nil,
		"layers_to_transform": nil, "lora_alpha": l.Alpha,
		"lora_bias": false, "lora_dropout": l.Dropout, "modules_to_save": nil, "peft_type": "LORA", "r": l.Rank,
		"rank_pattern": map[string]any{}, "revision": nil,
		"target_modules": targets, "target_parameters": nil, "task_type": "CAUSAL_LM", "use_dora": false,
		"use_rslora": l.RSLoRA,
	}, "", "  ")
	return append(text, '\n'), err
}

// SaveAdapters writes the adapters as a folder that PEFT loads. whole returns the trained
// parameters of a group as one flat tensor, as for Save. source has the folder of the base model
// and names the tokenizer's files. One rank calls SaveAdapters.
func (m *Model) SaveAdapters(dir string, source Source, whole func(Portion) (tensor.Tensor, error)) error {
	tensors, done, err := m.stored(whole, false)
	if err != nil {
		return err
	}
	defer done()
	for i := range tensors {
		tensors[i].Name = adapterPrefix + tensors[i].Name
	}
	return writeWeights(dir, adapterFile, func(dir string) error { return m.saveAdapterRest(dir, source) }, tensors)
}

func (m *Model) saveAdapterRest(dir string, source Source) error {
	base := source.Base
	if abs, err := filepath.Abs(base); err == nil {
		base = abs
	}
	text, err := m.adapterConfig(base)
	if err != nil {
		return err
	}
	err = tensor.WriteFile(filepath.Join(dir, AdapterConfigFile), func(w io.Writer) error {
		_, err := io.Copy(w, bytes.NewReader(text))
		return err
	})
	if err != nil {
		return err
	}
	return source.write(dir)
}

// WriteAdapters writes a folder of adapters from the tensors of a checkpoint, whose names are
// without the prefix of PEFT, and from the files that SaveRest has written to a folder.
func (c *Config) WriteAdapters(dir, rest string, listed []string, tensors []Stored) error {
	tensors = c.InFiles(tensors)
	for i := range tensors {
		tensors[i].Name = adapterPrefix + tensors[i].Name
	}
	return writeWeights(dir, adapterFile, func(dir string) error {
		return copyRest(dir, rest, AdapterConfigFile, listed)
	}, tensors)
}

// IsAdapter reports whether a name in a checkpoint is that of a matrix of an adapter.
func IsAdapter(name string) bool {
	p := Param{Name: name}
	return p.isAdapter()
}

// outsideLayers returns the path of the embedding or the output matrix if a tensor of PEFT is of an
// adapter of it, or a copy of it, which PEFT saves beside its adapter; "" for other tensors.
func outsideLayers(name string) string {
	path := strings.Split(strings.TrimPrefix(name, adapterPrefix), ".")
	for _, matrix := range []string{embeddingName, tiedName} {
		whole := module(matrix)
		if i := slices.Index(path, whole[strings.LastIndex(whole, ".")+1:]); i >= 0 {
			return strings.Join(path[:i+1], ".")
		}
	}
	return ""
}

// notOfALayer says why the module at a path has no adapter.
func notOfALayer(path string) string { return input.Short(path) + " is not a matrix of a layer" }

// checkLayers returns an error for a tensor outside of the layers that is not known. what is the
// beginning of the error.
func (f *AdapterFolder) checkLayers(what string, known map[string]bool) error {
	for _, e := range f.file.Entries() {
		if path := outsideLayers(e.Name); path != "" && !known[e.Name] {
			return status.Errorf(status.InvalidConfig,
				"%s: %s has tensor %v, and %s; train adapters of matrices of the layers, such as q_proj", what, f.Dir,
				e, notOfALayer(path))
		}
	}
	return nil
}

// locate returns where the file has a tensor of an adapter.
func (f *AdapterFolder) locate(c *Config, name string, e tensor.Entry) location {
	at := c.locate(name, e)
	at.file = f.file
	return at
}

// LoadAdapters reads the elements of adapters that this rank owns. The file must have the adapters
// of the model, and no others.
func (m *Model) LoadAdapters(f *AdapterFolder) error {
	var faults []string
	expected := map[string]*Param{}
	if err := f.checkLayers("lora.init", nil); err != nil {
		return err
	}
	for _, g := range m.groups {
		for _, p := range g.Params {
			if !p.isAdapter() {
				continue
			}
			expected[adapterPrefix+p.Name] = p
			if e, ok := f.file.Entry(adapterPrefix + p.Name); !ok {
				faults = append(faults, fmt.Sprintf("tensor %s%v is missing", adapterPrefix+p.Name, p.Shape))
			} else {
				faults = append(faults, p.disagree(e)...)
			}
		}
	}
	for _, e := range f.file.Entries() {
		if expected[e.Name] == nil {
			faults = append(faults, fmt.Sprintf("tensor %v is not an adapter of the model with these lora.targets", e))
		}
	}
	if len(faults) == 0 && f.LoRA.Scale() != m.lora.Scale() {
		faults = append(faults,
			fmt.Sprintf(
				"the scale of the adapters is %v (lora_alpha %v, r %d, use_rslora %v), that of [lora] is %v: set lora.alpha and lora.rslora alike",
				f.LoRA.Scale(), f.LoRA.Alpha, f.LoRA.Rank, f.LoRA.RSLoRA, m.lora.Scale()))
	}
	if err := list(status.InvalidConfig, "lora.init: "+f.Dir, faults); err != nil {
		return err
	}
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	for _, e := range f.file.Entries() {
		p := expected[e.Name]
		at := f.locate(m.Config, p.Name, e)
		buffer := make([]float32, min(1<<18, p.Numel()))
		err := m.upload(s, p, buffer, func(start int64, dst []float32) error {
			if err := at.read(start, dst); err != nil {
				return err
			}
			return finite(at, start, dst)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
