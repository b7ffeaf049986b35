package model

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Experts has the fields of a decoder whose MLPs have experts: a router chooses PerToken of Count
// MLPs for each token.
type Experts struct {
	Count    int64 // 0 = no layer has experts
	PerToken int64
	Size     int64 // features of gate and of up in an expert
	Shared   int64 // the same of an expert that all tokens have, which has a gate; 0 = there is none
	// Normalize divides the weights of a token's experts by their sum.
	Normalize bool
	// Balance is the coefficient of the loss that balances the experts (router_aux_loss_coef); 0 =
	// there is none. As in transformers, it has an effect only with output_router_logits.
	Balance float64
	// Biased says that each expert has a bias by which it is chosen (use_expert_bias), see
	// expertBias.
	Biased bool `json:",omitempty"`

	newBias bool           // the folder has no biases
	dense   map[int64]bool // layers without experts (mlp_only_layers)
	step    int64          // of every so many layers, the last has experts (decoder_sparse_step)
}

// expertFields are the fields and the names of weights of a family whose MLPs have experts.
type expertFields struct {
	number, size string // the fields with the number of experts and with their width
	aliases      []string
	normalize    bool     // the weights are always divided by their sum; otherwise by norm_topk_prob
	normalized   bool     // default of norm_topk_prob
	layers       bool     // mlp_only_layers and decoder_sparse_step are read
	shared       bool     // shared_expert_intermediate_size is read
	everywhere   bool     // all layers have experts, and there is no intermediate_size
	coefficient  float64  // default of router_aux_loss_coef; 0 = 0.001
	misread      bool     // PEFT takes gate_proj, up_proj and down_proj of any MLP for experts
	zero         []string // fields that must be 0
	stacked      bool     // the form of gpt-oss: biases, a clamped activation, and one tensor for all experts
	block        string   // the module in a layer
	router       string   // the router in this module; "" = gate
	gate, up     string   // the matrices of an expert
	down         string
}

var (
	mixtralExperts = expertFields{number: "num_local_experts", size: "intermediate_size",
		aliases: []string{"num_experts"}, normalize: true, zero: []string{"router_jitter_noise"},
		block: "block_sparse_moe", gate: "w1", up: "w3", down: "w2"}
	qwenExperts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, layers: true, misread: true, block: "mlp", gate: "gate_proj",
		up: "up_proj", down: "down_proj"}
	qwen2Experts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, layers: true, shared: true, misread: true, block: "mlp",
		gate: "gate_proj", up: "up_proj", down: "down_proj"}
	olmoExperts = expertFields{number: "num_experts", size: "intermediate_size",
		aliases: []string{"num_local_experts"}, coefficient: 0.01, misread: true, block: "mlp",
		gate: "gate_proj", up: "up_proj", down: "down_proj"}
	nextExperts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, normalized: true, layers: true, shared: true, misread: true,
		block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj"}
	ossFields = expertFields{number: "num_local_experts", size: "intermediate_size",
		aliases: []string{"num_experts"}, normalize: true, stacked: true, block: "mlp", router: "router"}
	hybridExperts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, normalize: true, shared: true, everywhere: true,
		block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj"}
)

// routerName returns the name of the router in the module.
func (x *expertFields) routerName() string { return cmp.Or(x.router, "gate") }

// Sparse reports whether the MLP of a layer has experts.
func (c *Config) Sparse(layer int64) bool {
	e := &c.Experts
	return e.Count > 0 && !e.dense[layer] && (layer+1)%e.step == 0
}

// SparseLayers returns the number of layers whose MLP has experts.
func (c *Config) SparseLayers() (n int64) {
	for i := range c.NumHiddenLayers {
		if c.Sparse(i) {
			n++
		}
	}
	return n
}

// Balances reports whether training has a loss that balances the experts.
func (c *Config) Balances() bool { return c.Experts.Balance > 0 && c.SparseLayers() > 0 }

// readHybridExperts reads the fields of Qwen3-Next and of Qwen3.5-MoE.
func readHybridExperts(c *Config, r *reader) {
	readHybrid(c, r)
	readExperts(c, r)
}

func writeHybridExperts(c *Config, f fields) {
	writeHybrid(c, f)
	writeExperts(c, f)
}

// readOLMoE reads the fields of OLMoE (Muennighoff et al. 2024, arXiv:2409.02060).
func readOLMoE(c *Config, r *reader) {
	readExperts(c, r)
	if r.has("clip_qkv") {
		r.fault(status.Unsupported, "clip_qkv = %v is not built: %s", r.raw["clip_qkv"], notbuilt.Clips.Instead)
	}
}

// readExperts reads the fields of Mixtral (Jiang et al. 2024, arXiv:2401.04088) or of Qwen3-MoE.
func readExperts(c *Config, r *reader) {
	names, e := c.family.experts, &c.Experts
	number := names.number
	for _, alias := range names.aliases { // transformers 5 may write another name
		if !r.has(alias) {
			continue
		}
		if n, _ := asInt(r.raw[names.number]); r.raw[names.number] == nil {
			number = alias
		} else if m, _ := asInt(r.raw[alias]); n != m {
			r.fault(status.InvalidConfig, "%s = %v and %s = %v: they are names of the same number, give one of them",
				names.number, r.raw[names.number], alias, r.raw[alias])
		}
	}
	if names.stacked {
		c.readClamp(r)
		if r.number(number, float64(c.family.size(names.number, r))) == 0 && r.has(number) {
			for _, name := range []string{"num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
				"use_expert_bias"} {
				r.ineffective(name, "remove it, or set "+number+" above 0")
			}
			return // a dense MLP
		}
	}
	e.Count = r.extent(number, c.family.size(names.number, r), 1<<16)
	e.PerToken = r.extent("num_experts_per_tok", c.family.size("num_experts_per_tok", r), 1<<10)
	if e.PerToken > e.Count && e.Count > 0 {
		r.fault(status.InvalidConfig,
			"num_experts_per_tok = %d, %s = %d: a token cannot have more experts than there are", e.PerToken,
			number, e.Count)
	}
	if e.Size = c.IntermediateSize; names.size != "intermediate_size" {
		e.Size = r.extent(names.size, c.family.size(names.size, r), 1<<26)
	}
	if names.shared {
		e.Shared = r.extent("shared_expert_intermediate_size", c.family.size("shared_expert_intermediate_size", r),
			1<<26)
	}
	e.Normalize, e.step = true, 1
	if !names.normalize {
		e.Normalize = r.flag("norm_topk_prob", names.normalized)
	}
	if names.layers {
		e.step = r.extent("decoder_sparse_step", 1, maxLayers)
		c.readDenseLayers(r)
	}
	for _, name := range names.zero {
		if x := r.number(name, 0); x != 0 {
			r.fault(status.Unsupported, "%s = %v is not built: %s", name, x, notbuilt.RouterNoise.Instead)
		}
	}
	coefficient := r.number("router_aux_loss_coef", cmp.Or(names.coefficient, 0.001))
	if !(coefficient >= 0 && coefficient < 1e30) {
		r.fault(status.InvalidConfig, "router_aux_loss_coef = %v: give a number of at least 0", coefficient)
	}
	if r.flag("output_router_logits", false) {
		e.Balance = coefficient
	}
	c.checkOwnBalance(r, r.raw)
	e.Biased = r.flag("use_expert_bias", false)
}

// checkOwnBalance adds a fault if a job sets a coefficient that has no effect. own has the fields
// that the job sets.
func (c *Config) checkOwnBalance(r *reader, own map[string]any) {
	if x, given := asFloat(own["router_aux_loss_coef"]); r.strict && given && x != 0 && c.Experts.Balance == 0 {
		r.fault(status.InvalidConfig,
			"router_aux_loss_coef = %v has no effect; set output_router_logits = true as well, or remove it", x)
	}
}

// readsPacked reports whether a folder is quantized in the form that is read: MXFP4 of gpt-oss. The
// field is not written again.
func (c *Config) readsPacked(r *reader) bool {
	q, _ := r.raw["quantization_config"].(map[string]any)
	if c.stackedExperts() && q["quant_method"] == "mxfp4" {
		r.value("quantization_config")
		return true
	}
	return false
}

// readClamp refuses other constants of the activation of gpt-oss than the published ones.
func (c *Config) readClamp(r *reader) {
	for _, x := range []struct {
		name  string
		value float64
	}{{"swiglu_alpha", 1.702}, {"swiglu_limit", 7}} {
		if v := r.number(x.name, x.value); v != x.value {
			r.fault(status.Unsupported, "%s = %v is not built: %s", x.name, v, notbuilt.Clamps.Instead)
		}
	}
}

// readDenseLayers reads mlp_only_layers, the layers without experts.
func (c *Config) readDenseLayers(r *reader) {
	list, given := r.value("mlp_only_layers").([]any)
	if !given && r.has("mlp_only_layers") {
		r.fault(status.InvalidConfig, "mlp_only_layers = %v: give a list of the layers without experts, counted from 0",
			r.raw["mlp_only_layers"])
	}
	c.Experts.dense = map[int64]bool{}
	for i, x := range list {
		n, ok := asInt(x)
		if !ok || n < 0 || c.NumHiddenLayers > 0 && n >= c.NumHiddenLayers {
			r.fault(status.InvalidConfig, "mlp_only_layers[%d] = %v: give the number of a layer, from 0 to %d", i, x,
				c.NumHiddenLayers-1)
			return
		}
		c.Experts.dense[n] = true
	}
}

func writeExperts(c *Config, f fields) {
	names, e := c.family.experts, &c.Experts
	if e.Count == 0 {
		f.put(names.number, e.Count)
		return
	}
	if names.stacked {
		delete(f, "quantization_config") // the weights are written as they are read
	}
	if !slices.ContainsFunc(names.aliases, func(alias string) bool { return f[alias] != nil }) {
		f.put(names.number, e.Count)
	}
	f.put("num_experts_per_tok", e.PerToken)
	f.put(names.size, e.Size)
	if names.shared {
		f.put("shared_expert_intermediate_size", e.Shared)
	}
	if !names.normalize {
		f.put("norm_topk_prob", e.Normalize)
	}
	if e.Biased {
		f.put("use_expert_bias", true)
	}
}

// refuseExperts refuses experts in families in which they are not built, by the field or by the
// family's default.
func (c *Config) refuseExperts(r *reader) {
	if c.family.experts != nil {
		return
	}
	n, local := r.number("num_experts", 0), r.number("num_local_experts", 0)
	name := "num_experts"
	if local > 0 {
		n, name = local, "num_local_experts"
	}
	if n > 0 {
		r.fault(status.Unsupported, "%s = %v: %s", name, n, notbuilt.Experts.Text(notbuilt.Experts.Instead))
	}
}

// refuseExpertTargets refuses targets of adapters that name experts or other bare matrices.
func (m *Model) refuseExpertTargets(targets []string) error {
	for _, g := range m.groups {
		for _, p := range g.Params {
			for _, t := range targets {
				if (p.expert || p.bare) && t != AllLinear && adapts(t, module(p.Name)) {
					return status.Errorf(status.Unsupported, "lora.targets: %q names %s: %s", t, module(p.Name),
						notbuilt.ExpertAdapters.Text(notbuilt.ExpertAdapters.Instead))
				}
			}
		}
	}
	return nil
}

// leaveOutMisread marks the matrices of all MLPs as matrices that cannot have an adapter, if PEFT
// takes their names for names of experts. Experts were modules before transformers 5: PEFT renames
// such targets, and then leaves out the adapters of shared experts and of layers without experts.
func (m *Model) leaveOutMisread() {
	if x := m.Config.family.experts; x == nil || !x.misread {
		return
	}
	for _, g := range m.groups {
		for _, p := range g.Params {
			for _, t := range []string{"gate_proj", "up_proj", "down_proj"} {
				if p.matrix && adapts(t, module(p.Name)) {
					p.matrix, p.bare = false, true
				}
			}
		}
	}
}

// checkFrozenExperts returns an error if some of the experts of a layer are frozen: the matrices of
// all experts are one tensor of the grouped products, which is trained or frozen.
func (m *Model) checkFrozenExperts() error {
	for _, b := range m.blocks {
		x, ok := b.mlp.(*experts)
		if !ok {
			continue
		}
		for _, matrices := range [][]*Param{x.gateUp.w, x.gateUp.b, x.down.w, x.down.b} {
			for _, p := range matrices {
				if first := matrices[0]; p.Frozen != first.Frozen {
					if p.Frozen {
						p, first = first, p
					}
					return status.Errorf(status.InvalidConfig,
						"train.freeze: %s is frozen and %s is not; freeze the matrices of all experts of a layer or of none, for example with \"*.experts.*\"",
						first.Name, p.Name)
				}
			}
		}
	}
	return nil
}

// Newer versions of transformers have the matrices of all experts of a layer in two tensors, and
// can save them: gate_up_proj [E, 2F, hidden], gate and then up of each expert, and down_proj
// [E, hidden, F]. Their module is mlp in all families.
const (
	stackedGateUp = ".mlp.experts.gate_up_proj"
	stackedDown   = ".mlp.experts.down_proj"
	stackedRouter = ".mlp.gate.weight"
)

// unstack returns the tensors of single experts in a tensor of a file, or the tensor itself.
func (c *Config) unstack(e tensor.Entry) ([]tensor.Entry, error) {
	names, x := c.family.experts, &c.Experts
	if names == nil || names.stacked {
		return []tensor.Entry{e}, nil
	}
	layer, gateUp := strings.CutSuffix(e.Name, stackedGateUp)
	want := []int64{x.Count, 2 * x.Size, c.HiddenSize}
	if !gateUp {
		var down bool
		if layer, down = strings.CutSuffix(e.Name, stackedDown); !down {
			return []tensor.Entry{e}, nil
		}
		want = []int64{x.Count, c.HiddenSize, x.Size}
	}
	if !slices.Equal(e.Shape, want) {
		return nil, status.Errorf(status.InvalidConfig,
			"tensor %v: config.json says %v (%s, %s, hidden_size): correct one of them", e, want, names.number,
			names.size)
	}
	var parts []tensor.Entry
	name := func(expert int64, matrix string) string {
		return fmt.Sprintf("%s.%s.experts.%d.%s.weight", layer, names.block, expert, matrix)
	}
	n := x.Size * c.HiddenSize
	for i := range x.Count {
		if gateUp {
			parts = append(parts, e.Part(name(i, names.gate), 2*i*n, x.Size, c.HiddenSize),
				e.Part(name(i, names.up), (2*i+1)*n, x.Size, c.HiddenSize))
		} else {
			parts = append(parts, e.Part(name(i, names.down), i*n, c.HiddenSize, x.Size))
		}
	}
	return parts, nil
}

var (
	layerOf  = regexp.MustCompile(`^model\.layers\.\d+\.`)
	expertOf = regexp.MustCompile(`\.experts\.(\d+)\.`)
)

// expertsLast puts the experts of each layer after its other tensors, by their number, so that the
// order in files does not depend on the ranks among which experts are divided.
func (c *Config) expertsLast(tensors []Stored) []Stored {
	if c.SparseLayers() == 0 {
		return tensors
	}
	number := func(t Stored) int64 {
		if m := expertOf.FindStringSubmatch(t.Name); m != nil {
			if n, err := strconv.ParseInt(m[1], 10, 64); err == nil {
				return n
			}
		}
		return -1
	}
	tensors = slices.Clone(tensors)
	for lo, hi := 0, 0; lo < len(tensors); lo = hi {
		layer := layerOf.FindString(tensors[lo].Name)
		for hi = lo + 1; hi < len(tensors) && layerOf.FindString(tensors[hi].Name) == layer; hi++ {
		}
		if layer != "" {
			slices.SortStableFunc(tensors[lo:hi], func(a, b Stored) int { return cmp.Compare(number(a), number(b)) })
		}
	}
	return tensors
}

// nameOf returns the name in this package of a tensor of a file; of experts in one tensor, that of
// the first.
func (c *Config) nameOf(stored string) string {
	name, names := c.family.files.textName(stored), c.family.experts
	if names == nil {
		return name
	}
	if layer, ok := strings.CutSuffix(name, fusedQKVZ); ok && c.family.fusedLinear {
		return layer + fusedParts[0]
	} else if layer, ok := strings.CutSuffix(name, fusedBA); ok && c.family.fusedLinear {
		return layer + fusedParts[2]
	}
	if layer, kind, ok := c.ossEntry(name); ok {
		return ossName(layer, 0, kind)
	}
	for _, x := range [][2]string{{stackedGateUp, ".experts.0." + names.gate + ".weight"},
		{stackedDown, ".experts.0." + names.down + ".weight"}, {stackedRouter, ".gate.weight"}} {
		if layer, ok := strings.CutSuffix(name, x[0]); ok {
			return layer + "." + names.block + x[1]
		}
	}
	return name
}
