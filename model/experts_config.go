package model

import (
	"cmp"
	"maps"
	"slices"

	"ulysses/device"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// Experts has the fields of a decoder whose MLPs have experts: a router chooses PerToken of Count
// MLPs for each token.
type Experts struct {
	Count    int64 // 0 = no layer has experts
	PerToken int64
	Size     int64 // features of gate and of up in an expert
	Shared   int64 // the same of an expert that all tokens have; 0 = there is none
	// Normalize divides the weights of a token's experts by their sum.
	Normalize bool
	// Balance is the coefficient of the loss that balances the experts (router_aux_loss_coef); 0 =
	// there is none. As in transformers, it has an effect only with output_router_logits.
	Balance float64
	// Biased says that each expert has a bias by which it is chosen (use_expert_bias), see
	// expertBias.
	Biased bool `json:",omitempty"`
	// Sigmoid says that weights are sigmoids of the router's logits, instead of their softmax.
	// Weights are multiplied by Scale (routed_scaling_factor). The experts are in Groups groups, of
	// which a token chooses from KeptGroups (n_group, topk_group). See device.Route.
	Sigmoid            bool    `json:",omitempty"`
	Scale              float64 `json:",omitempty"`
	Groups, KeptGroups int64   `json:",omitempty"`

	newBias bool           // the folder has no biases
	dense   map[int64]bool // layers without experts
	step    int64          // of every so many layers, the last has experts
}

// expertFields are the fields and the names of weights of a family whose MLPs have experts.
type expertFields struct {
	number, size string // the fields with the number of experts and with their width
	aliases      []string
	perToken     string     // the field with the experts of a token; "" = num_experts_per_tok
	normalize    bool       // the weights are always divided by their sum; otherwise by norm_topk_prob
	normalized   bool       // default of norm_topk_prob
	sigmoid      bool       // weights are sigmoids of logits
	grouped      bool       // the router is that of DeepSeek-V2 or V3, with groups of experts
	biased       bool       // every folder has biases of experts; otherwise by use_expert_bias
	biasModule   string     // the module with the biases, "." = the block; "" = the router
	sparse       sparseRule // which layers have experts
	shared       bool       // shared_expert_intermediate_size is read, and the shared expert has a gate
	sharedCount  string     // the field with the number of shared experts, which are one without a gate
	everywhere   bool       // all layers have experts, and there is no intermediate_size
	coefficient  float64    // default of router_aux_loss_coef; 0 = 0.001
	misread      bool       // PEFT takes gate_proj, up_proj and down_proj of any MLP for experts
	zero         []string   // fields that must be 0
	stacked      bool       // the form of gpt-oss: biases, a clamped activation, and one tensor for all experts
	block        string     // the module in a layer
	router       string     // the router in this module; "" = gate
	gate, up     string     // the matrices of an expert
	down         string
}

var (
	mixtralExperts = expertFields{number: "num_local_experts", size: "intermediate_size",
		aliases: []string{"num_experts"}, normalize: true, zero: []string{"router_jitter_noise"},
		block: "block_sparse_moe", gate: "w1", up: "w3", down: "w2"}
	qwenExperts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, sparse: sparseUnlisted, misread: true, block: "mlp", gate: "gate_proj",
		up: "up_proj", down: "down_proj"}
	qwen2Experts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, sparse: sparseUnlisted, shared: true, misread: true, block: "mlp",
		gate: "gate_proj", up: "up_proj", down: "down_proj"}
	olmoExperts = expertFields{number: "num_experts", size: "intermediate_size",
		aliases: []string{"num_local_experts"}, coefficient: 0.01, misread: true, block: "mlp",
		gate: "gate_proj", up: "up_proj", down: "down_proj"}
	nextExperts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, normalized: true, sparse: sparseUnlisted, shared: true, misread: true,
		block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj"}
	ossFields = expertFields{number: "num_local_experts", size: "intermediate_size",
		aliases: []string{"num_experts"}, normalize: true, stacked: true, block: "mlp", router: "router"}
	glmExperts = expertFields{number: "n_routed_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts", "num_experts"}, normalized: true, sigmoid: true, grouped: true,
		biased: true, sparse: sparseAfter, sharedCount: "n_shared_experts", misread: true, block: "mlp",
		gate: "gate_proj", up: "up_proj", down: "down_proj"}
	deepSeek2Experts = glmExperts.bySoftmax()
	liteExperts      = glmExperts.withSparse(sparseListed)
	ernieExperts     = expertFields{number: "moe_num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_experts", "num_local_experts"}, perToken: "moe_k", normalize: true,
		biased: true, biasModule: "moe_statics", sparse: sparseBetween, sharedCount: "moe_num_shared_experts",
		misread: true, block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj"}
	miniMaxExperts = expertFields{number: "num_local_experts", size: "intermediate_size",
		aliases: []string{"num_experts"}, normalize: true, sigmoid: true, biased: true, biasModule: ".",
		zero: []string{"router_jitter_noise"}, block: "block_sparse_moe", gate: "w1", up: "w3", down: "w2"}
	hybridExperts = expertFields{number: "num_experts", size: "moe_intermediate_size",
		aliases: []string{"num_local_experts"}, normalize: true, shared: true, everywhere: true,
		block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj"}
)

// bySoftmax returns the fields of DeepSeek-V2, whose router has a softmax instead of sigmoids, no
// biases, and weights that are not normalized.
func (x expertFields) bySoftmax() expertFields {
	x.sigmoid, x.biased, x.normalized = false, false, false
	return x
}

// routerName returns the name of the router in the module.
func (x *expertFields) routerName() string { return cmp.Or(x.router, "gate") }

// perTokenField returns the field with the experts of a token.
func (x *expertFields) perTokenField() string { return cmp.Or(x.perToken, "num_experts_per_tok") }

// biasName returns the name in a layer of the experts' biases.
func (x *expertFields) biasName() string {
	const name = "e_score_correction_bias"
	if x.biasModule == "." {
		return x.block + "." + name
	}
	return x.block + "." + cmp.Or(x.biasModule, x.routerName()) + "." + name
}

// sharedName returns the module of the expert of all tokens.
func (x *expertFields) sharedName() string {
	if x.sharedCount != "" {
		return "shared_experts"
	}
	return "shared_expert"
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

// readErnie reads the fields of ERNIE 4.5 (Baidu 2025).
func readErnie(c *Config, r *reader) {
	readExperts(c, r)
	if least := r.number("moe_norm_min", 1e-12); least != 1e-12 {
		r.fault(status.Unsupported, "moe_norm_min = %v is not built: %s", least, notbuilt.Routers.Instead)
	}
}

// readMiniMax reads the fields of MiniMax-M2 (MiniMax 2025). Published folders give the share of
// rotated features as their number.
func readMiniMax(c *Config, r *reader) {
	readExperts(c, r)
	r.accepts("rotary_dim")
	if n := r.count("rotary_dim", 0, 1<<16); n > 0 && r.raw["partial_rotary_factor"] == nil {
		r.raw["partial_rotary_factor"] = float64(n) / float64(c.HeadDim)
	}
}

// withRotaryShare returns the fields of an override of MiniMax-M2 with the share of the rotated
// features, if the override changes their number or the size of a head: a configuration that was
// read has the former share.
func (c *Config) withRotaryShare(fields map[string]any) map[string]any {
	_, given := fields["partial_rotary_factor"]
	if c.ModelType != "minimax_m2" || given {
		return fields
	}
	n, ok := asInt(fields["rotary_dim"])
	if was, _ := asInt(c.raw["rotary_dim"]); fields["rotary_dim"] == nil && was == c.RotaryDim {
		n, ok = was, fields["head_dim"] != nil
	}
	dim, changed := asInt(fields["head_dim"])
	if !changed {
		dim = c.HeadDim
	}
	if !ok || n < 1 || dim < 1 { // a field that is wrong is reported where it is read
		return fields
	}
	fields = maps.Clone(fields)
	fields["partial_rotary_factor"] = float64(n) / float64(dim)
	return fields
}

// readExperts reads the fields of Mixtral (Jiang et al. 2024, arXiv:2401.04088) or of Qwen3-MoE.
func readExperts(c *Config, r *reader) {
	names, e := c.family.experts, &c.Experts
	number := names.number
	for _, alias := range names.aliases { // transformers 5 may write another name
		if !r.has(alias) {
			continue
		}
		if n, _ := asInt(r.raw[names.number]); r.missing(names.number) {
			number = alias
		} else if m, _ := asInt(r.raw[alias]); n != m {
			r.fault(status.InvalidConfig, "%s = %v and %s = %v: they are names of the same number, give one of them",
				names.number, r.raw[names.number], alias, r.raw[alias])
		}
	}
	if names.stacked {
		c.readClamp(r)
		if r.number(number, float64(c.family.size(names.number, r))) == 0 && r.has(number) {
			for _, name := range []string{names.perTokenField(), "output_router_logits", "router_aux_loss_coef",
				"use_expert_bias"} {
				r.ineffective(name, "remove it, or set "+number+" above 0")
			}
			return // a dense MLP
		}
	}
	e.Count = r.extent(number, c.family.size(names.number, r), 1<<16)
	perToken := names.perTokenField()
	e.PerToken = r.extent(perToken, c.family.size(perToken, r), 1<<10)
	if e.PerToken > e.Count && e.Count > 0 {
		r.fault(status.InvalidConfig, "%s = %d, %s = %d: a token cannot have more experts than there are", perToken,
			e.PerToken, number, e.Count)
	}
	if e.Size = c.IntermediateSize; names.size != "intermediate_size" {
		e.Size = r.extent(names.size, c.family.size(names.size, r), 1<<26)
	}
	c.readShared(r)
	e.Normalize = true
	if !names.normalize {
		e.Normalize = r.flag("norm_topk_prob", names.normalized)
	}
	c.readSparseLayers(r)
	e.Biased, e.Sigmoid = names.biased, names.sigmoid
	if names.grouped {
		c.readGroups(r)
	}
	if names.grouped && names.sigmoid {
		for _, name := range []string{"output_router_logits", "router_aux_loss_coef"} {
			r.ineffective(name, "remove it, and set optimizer.expert_bias_rate to balance the experts")
		}
		return
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
		if e.Balance = coefficient; names.sigmoid {
			r.fault(status.Unsupported, "output_router_logits = true is not built: %s", notbuilt.SigmoidBalance.Instead)
		}
	}
	c.checkOwnBalance(r, r.raw)
	if !names.biased {
		e.Biased = r.flag("use_expert_bias", false)
	}
	if e.Biased && e.Groups > 1 {
		r.fault(status.Unsupported, "use_expert_bias with n_group = %d is not built: %s", e.Groups,
			notbuilt.GroupBiases.Instead)
	}
}

// readShared reads the width of the expert of all tokens. Several are one with the sum of their
// widths, as in files.
func (c *Config) readShared(r *reader) {
	const width = "shared_expert_intermediate_size"
	switch names, e := c.family.experts, &c.Experts; {
	case names.shared:
		e.Shared = r.extent(width, c.family.size(width, r), 1<<26)
	case names.sharedCount != "":
		e.Shared = e.Size * r.count(names.sharedCount, c.family.size(names.sharedCount, r), 1<<10)
	}
}

// readGroups reads the fields of the routers of DeepSeek-V2 (arXiv:2405.04434, section 2.2.2) and
// DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
func (c *Config) readGroups(r *reader) {
	e := &c.Experts
	if method := c.readRouter(r); method == greedy {
		e.Groups, e.KeptGroups = 1, 1
		c.checkOwnGroups(r, r.raw)
	} else {
		e.Groups = r.extent("n_group", max(1, c.family.size("n_group", r)), device.MaxGroups)
		e.KeptGroups = r.extent("topk_group", max(1, c.family.size("topk_group", r)), device.MaxGroups)
	}
	scale := 1.0
	if !r.fresh {
		scale = cmp.Or(c.family.weightScale, 1)
	}
	e.Scale = r.positive("routed_scaling_factor", scale)
	switch {
	case e.Count%e.Groups != 0 || e.Groups > 1 && e.Count/e.Groups < 2:
		r.fault(status.InvalidConfig, "n_group = %d, n_routed_experts = %d: give groups of at least 2 experts each, "+
			"all of the same size", e.Groups, e.Count)
	case e.KeptGroups > e.Groups:
		r.fault(status.InvalidConfig, "topk_group = %d, n_group = %d: a token cannot have more groups than there are",
			e.KeptGroups, e.Groups)
	case e.PerToken > e.KeptGroups*(e.Count/e.Groups):
		r.fault(status.InvalidConfig,
			"num_experts_per_tok = %d: the %d groups of topk_group have %d experts; raise topk_group", e.PerToken,
			e.KeptGroups, e.KeptGroups*(e.Count/e.Groups))
	}
}

// checkOwnGroups adds a fault if a job sets groups of experts that have no effect. own has the
// fields that the job sets.
func (c *Config) checkOwnGroups(r *reader, own map[string]any) {
	if names := c.family.experts; names == nil || !names.grouped || names.sigmoid || c.Experts.Groups > 1 {
		return
	}
	for _, name := range []string{"n_group", "topk_group"} {
		n, given := asInt(own[name])
		if r.seen[name] = true; r.strict && given && n != 1 && c.raw["topk_method"] != groupGreedy {
			r.fault(status.InvalidConfig, "%s = %d has no effect with topk_method = %q; remove it, or set topk_method = %q",
				name, n, greedy, groupGreedy)
		}
	}
}

// The values of topk_method.
const (
	withBias    = "noaux_tc" // of DeepSeek-V3
	greedy      = "greedy"   // of DeepSeek-V2, without groups
	groupGreedy = "group_limited_greedy"
)

// readRouter refuses other routers than the published ones, and returns topk_method.
func (c *Config) readRouter(r *reader) (method string) {
	refuse := func(name string, value any) {
		r.fault(status.Unsupported, "%s = %v is not built: %s", name, value, notbuilt.Routers.Instead)
	}
	r.accepts("scoring_func", "moe_layer_freq") // transformers ignores them
	scoring, methods := "sigmoid", []string{withBias}
	if c.family.experts.sigmoid {
		r.accepts("topk_method")
	} else {
		scoring, methods = "softmax", []string{greedy, groupGreedy}
		if c.Experts.Normalize { // the original code would not scale the weights, transformers not normalize them
			refuse("norm_topk_prob", true)
		}
	}
	if text := r.text("scoring_func", scoring); text != scoring {
		refuse("scoring_func", quoted(text))
	}
	if method = r.text("topk_method", methods[0]); !slices.Contains(methods, method) {
		refuse("topk_method", quoted(method))
	}
	if n := r.number("moe_layer_freq", 1); n != 1 {
		refuse("moe_layer_freq", n)
	}
	return method
}

// checkOwnBalance adds a fault if a job sets a coefficient that has no effect. own has the fields
// that the job sets.
func (c *Config) checkOwnBalance(r *reader, own map[string]any) {
	if x, given := asFloat(own["router_aux_loss_coef"]); r.strict && given && x != 0 && c.Experts.Balance == 0 {
		r.fault(status.InvalidConfig,
			"router_aux_loss_coef = %v has no effect; set output_router_logits = true as well, or remove it", x)
	}
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

func writeExperts(c *Config, f fields) {
	names, e := c.family.experts, &c.Experts
	if e.Count == 0 {
		f.put(names.number, e.Count)
		return
	}
	if !slices.ContainsFunc(names.aliases, func(alias string) bool { return f[alias] != nil }) {
		f.put(names.number, e.Count)
	}
	f.put(names.perTokenField(), e.PerToken)
	f.put(names.size, e.Size)
	switch {
	case names.shared:
		f.put("shared_expert_intermediate_size", e.Shared)
	case names.sharedCount != "":
		f.put(names.sharedCount, e.Shared/e.Size)
	}
	if !names.normalize {
		f.put("norm_topk_prob", e.Normalize)
	}
	switch names.sparse {
	case sparseAfter:
		f.put("first_k_dense_replace", c.denseLayers())
	case sparseBetween:
		f.put("moe_layer_start_index", c.denseLayers())
	}
	if names.grouped {
		f.put("n_group", e.Groups)
		f.put("topk_group", e.KeptGroups)
		f.put("routed_scaling_factor", asFloats(e.Scale))
	}
	if names.grouped && !names.sigmoid {
		method := greedy
		if e.Groups > 1 {
			method = groupGreedy
		}
		f.put("topk_method", method)
	}
	if e.Biased && !names.biased {
		f.put("use_expert_bias", true)
	}
}

// refuseExperts refuses experts in families in which they are not built, by the field or by the
// family's default.
func (c *Config) refuseExperts(r *reader) {
	if c.family.experts != nil {
		return
	}
	r.accepts("num_experts", "num_local_experts") // transformers does not have the fields
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
