// Package model implements the decoders of the families in family.go, such as Llama, Gemma 3 and
// Qwen3.5, with explicit forward and backward passes over one rank's shard of the tokens. Tokens
// interact only in the token mixer (attention or linear attention). All other parts are local to a
// token.
package model

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Config describes a decoder. The fields have the names and the defaults of Hugging Face's
// config.json.
type Config struct {
	ModelType             string // one of ModelTypes
	VocabSize             int64
	HiddenSize            int64
	IntermediateSize      int64
	NumHiddenLayers       int64
	NumAttentionHeads     int64
	NumKeyValueHeads      int64
	HeadDim               int64 // of q and k; of v see ValueDim
	MaxPositionEmbeddings int64
	RMSNormEps            float64
	InitializerRange      float64
	Rope                  Rope
	LocalRope             *Rope // of layers with a window; nil = Rope
	// number of features of a head that are rotated, from the first on: HeadDim ·
	// partial_rotary_factor
	RotaryDim         int64
	TieWordEmbeddings bool
	AttentionBias     bool         // biases of q, k, v and o, in families where they are optional
	MLPBias           bool         // biases of gate, up and down, in families where they are optional
	NoQKNorm          bool         `json:",omitempty"` // without the norms of q and k of the family
	DType             tensor.DType // of stored weights; they are trained in F32
	// keys that a query sees in layers with a sliding window, its own included; 0 = no such layer
	SlidingWindow int64
	// of each layer: full_attention | sliding_attention | linear_attention; nil = full_attention
	LayerTypes []string
	// probability that a softmax weight becomes 0 in training; an evaluation has no dropout
	AttentionDropout float64
	// the same of an element of a sublayer's output, which is not built, see DropsResiduals
	ResidualDropout float64 `json:"-"`
	ScoreScale      float64 // of the product of a query and a key; 0 = 1/sqrt(HeadDim)
	// c > 0: a scaled score, or a logit, x becomes c·tanh(x/c); 0 = off
	ScoreSoftcap, LogitSoftcap float64
	Hybrid                             // Qwen3.5 only
	Latent                             // DeepSeek-V3 and GLM-4.7-Flash only
	Experts                    Experts // Mixtral and Qwen3-MoE only

	family *family
	// factors of embeddings, of the outputs of sublayers and of logits; 0 = 1 (Granite)
	EmbeddingScale, ResidualScale, LogitsScale float64
	NoRope                                     []bool // layers without RoPE; nil = none (SmolLM3)

	packing packing        // of the weights in files
	raw     map[string]any // config.json as read, for Save and Override
	// DType was overridden: Save writes it instead of the types of the source's files
	forced bool
	// inJob says that the fields are in the job file, not in a config.json.
	inJob bool
	// about fields that are read in another way than their author may have expected
	warnings []string
}

// QKVBias reports whether q, k and v have biases.
func (c *Config) QKVBias() bool { return c.AttentionBias || c.family.biases == qkvBiases }

// OutBias reports whether the output of attention has a bias.
func (c *Config) OutBias() bool { return c.AttentionBias && c.family.biases == optionalBiases }

// QKNorm reports whether the heads of q and k have norms.
func (c *Config) QKNorm() bool { return c.family.qkNorm && !c.NoQKNorm }

// OutputGate reports whether the output of attention has a gate.
func (c *Config) OutputGate() bool { return c.family.outputGate }

// Sinks reports whether each query head has a sink.
func (c *Config) Sinks() bool { return c.family.sinks }

// NormCentre returns what is added to the weights of norms: 1 if they are stored as their distance
// from 1, otherwise 0.
func (c *Config) NormCentre() float64 { return c.family.normCentre }

// embeddingScale returns the factor of embeddings, rounded to the compute type as in
// transformers.
func (c *Config) embeddingScale(compute tensor.DType) float64 {
	if !c.family.embedScaled {
		return cmp.Or(c.EmbeddingScale, 1)
	}
	scale := float32(math.Sqrt(float64(c.HiddenSize)))
	if compute == tensor.BF16 {
		scale = tensor.BF16ToF32(tensor.F32ToBF16(scale))
	}
	return float64(scale)
}

// ParseConfig reads the text of a config.json. The error lists every fault with its field, its
// value and what to do.
func ParseConfig(text []byte) (*Config, error) { return parseConfig(text, nil) }

// parseConfig reads a config.json and replaces some of its fields. The file's own value of a
// replaced field is not checked.
func parseConfig(text []byte, override map[string]any) (*Config, error) {
	raw, err := fieldsOf(text)
	if err != nil {
		return nil, err
	}
	if len(override) == 0 {
		return read("config.json", raw, false)
	}
	return readFields(&reader{where: "config.json", raw: raw, seen: map[string]bool{}}).Override(override)
}

// fieldsOf returns the fields of the text of a config.json.
func fieldsOf(text []byte) (map[string]any, error) {
	text = input.TrimBOM(text)
	var raw map[string]any
	err := input.JSON(text, &raw)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(text))
		d.UseNumber() // so that Save writes the numbers as they were
		err = d.Decode(&raw)
	}
	if err != nil || raw == nil {
		return nil, status.Errorf(status.InvalidConfig,
			"config.json: not a JSON object (%v): the file is damaged or another format", err)
	}
	return textOf(raw), nil
}

// ConfigFromMap reads the fields of a model from scratch, the [model.new] table of a job. Unknown
// fields are faults; in a config.json they are ignored, because transformers adds fields of its
// own.
func ConfigFromMap(fields map[string]any) (*Config, error) {
	c, err := read("model.new", maps.Clone(fields), true)
	if err == nil {
		c.inJob = true
	}
	return c, err
}

// Override returns a config with some fields of config.json replaced. RoPE's fields are replaced in
// whichever of their places the file has them.
func (c *Config) Override(fields map[string]any) (*Config, error) {
	if len(fields) == 0 {
		return c, nil
	}
	names := &reader{where: "model.override", raw: maps.Clone(fields), seen: map[string]bool{}, strict: true}
	if names.raw["model_type"] == nil {
		names.raw["model_type"] = c.ModelType
	}
	readFields(names)
	// values are checked below, with the fields that are not replaced
	names.faults, names.wrong = slices.Clone(names.unknowns), len(names.unknowns) > 0
	names.unknown()
	if names.err() != nil {
		return nil, names.err()
	}
	fields = c.withRotaryShare(fields)
	raw := maps.Clone(c.raw)
	if raw == nil {
		raw = map[string]any{}
	}
	if fields["model_type"] != nil {
		raw["model_type"] = fields["model_type"]
	}
	overrideRope(raw, fields)
	for name, follows := range derived {
		if fields[name] != nil {
			delete(raw, follows)
		}
	}
	for name, value := range fields {
		switch {
		case slices.Contains(ropeNames, name): // as above
		case name == "dtype" || name == "torch_dtype":
			delete(raw, "dtype")
			raw["torch_dtype"] = value // transformers 4 and 5 both read it
		default:
			raw[name] = value
		}
	}
	if n, ok := asInt(fields["sliding_window"]); ok && n == 0 {
		raw["sliding_window"] = nil // TOML has no null
		if f := families[fmt.Sprint(raw["model_type"])]; f != nil && f.window > 0 && fields["layer_types"] == nil {
			delete(raw, "layer_types") // which may name layers with a window
		}
	}
	where := "config.json with model.override"
	if c.inJob {
		where = "model.override"
	}
	r, err := (&reader{where: where, raw: raw, seen: map[string]bool{}, fresh: c.inJob}).read()
	if err != nil {
		return nil, err
	}
	r.inJob = c.inJob
	_, a := fields["dtype"]
	_, b := fields["torch_dtype"]
	r.forced = c.forced || a || b
	own := &reader{where: "model.override", seen: map[string]bool{}, strict: true}
	if n, ok := asInt(fields["sliding_window"]); !ok || n != 0 { // 0 removes the window
		r.checkOwnWindow(own, fields)
	}
	r.checkOwnBalance(own, fields)
	r.checkOwnGroups(own, fields)
	checkOwnDType(own, fields)
	if err := own.err(); err != nil {
		return nil, err
	}
	r.extend(fields)
	if len(r.warnings) == 0 && fields["rope_theta"] == nil && fields["rope_parameters"] == nil {
		r.warnings = c.warnings // overrideRope moves thetas into the tables
	}
	return r, nil
}

// derived has the lists of layers that follow from other fields, which a saved config.json has as
// well.
var derived = map[string]string{"use_sliding_window": "layer_types", "max_window_layers": "layer_types",
	"sliding_window_pattern":  "layer_types",
	"full_attention_interval": "layer_types", "no_rope_layer_interval": "no_rope_layers"}

// read reads the fields of a config.json, or with own the user's own fields of a new model.
func read(where string, raw map[string]any, own bool) (*Config, error) {
	return (&reader{where: where, raw: raw, seen: map[string]bool{}, strict: own, fresh: own}).read()
}

func (r *reader) read() (*Config, error) {
	c := readFields(r)
	if r.strict {
		r.unknown()
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	return c, nil
}

// Upper limits of fields. With them, products of two fields fit in int64, and a damaged or
// malicious file cannot make the program allocate excessive memory.
const (
	maxExtent = 1<<31 - 1
	maxLayers = 1 << 14

	// of all layers: a model has several tensors for each. Published models have less than 2^15.
	maxExperts = 1 << 20

	maxPositions = 1 << 40
)

func readFields(r *reader) *Config {
	c := &Config{raw: r.raw}
	r.accepts("model_type", "dtype", "torch_dtype")
	c.ModelType = r.text("model_type", "")
	if _, given := r.raw["layer_types"]; given && c.ModelType == "mistral" { // as AutoConfig of transformers
		c.ModelType, r.raw["model_type"] = "ministral", "ministral"
		delete(r.raw, "architectures")
	}
	if c.ModelType == "kimi_k2" { // the code in its folders is that of DeepSeek-V3
		c.ModelType, r.raw["model_type"] = "deepseek_v3", "deepseek_v3"
		delete(r.raw, "auto_map")
		delete(r.raw, "architectures")
	}
	if c.family = families[c.ModelType]; c.ModelType == "" {
		r.fault(status.InvalidConfig, "model_type is missing: %s built", notbuilt.ModelTypes.Instead)
	} else if c.family == nil {
		why := notbuilt.ModelTypeReasons[c.ModelType]
		if why != "" {
			why = " (" + why + ")"
		}
		r.fault(status.Unsupported, "model_type = %q%s is not built: %s", c.ModelType, why, notbuilt.ModelTypes.Instead)
	}
	if c.family == nil {
		r.unknownType = true
		return c // the other fields may have a different meaning
	}
	c.acceptNulls(r)
	c.family.setRope(r.raw)
	c.VocabSize = r.extent("vocab_size", c.family.size("vocab_size", r), maxExtent)
	c.HiddenSize = r.extent("hidden_size", 0, 1<<24)
	if c.family.experts == nil || !c.family.experts.everywhere {
		c.IntermediateSize = r.extent("intermediate_size", 0, 1<<26)
	}
	c.NumHiddenLayers = r.extent("num_hidden_layers", 0, maxLayers)
	c.NumAttentionHeads = r.extent("num_attention_heads", c.family.size("num_attention_heads", r), 1<<16)
	keys := c.family.size("num_key_value_heads", r)
	if keys == 0 || r.isNull("num_key_value_heads") {
		keys = max(c.NumAttentionHeads, 1)
	}
	c.NumKeyValueHeads = r.extent("num_key_value_heads", keys, 1<<16)
	if c.family.latent {
		c.readLatent(r)
	} else {
		c.readHeads(r)
	}
	if c.family.read != nil {
		c.family.read(c, r)
	}
	c.MaxPositionEmbeddings = r.extent("max_position_embeddings",
		max(2048, c.family.size("max_position_embeddings", r)), maxPositions)
	c.RMSNormEps = r.positive("rms_norm_eps", c.family.eps)
	c.InitializerRange = r.number("initializer_range", 0.02)
	if !(c.InitializerRange >= 0) || math.IsInf(c.InitializerRange, 0) {
		r.fault(status.InvalidConfig, "initializer_range = %v: give a number of at least 0", c.InitializerRange)
	}
	c.readLayers(r)
	if c.readRope(r); c.IsLatent() {
		c.scaleLatent()
	}
	c.TieWordEmbeddings = r.flag("tie_word_embeddings", c.family.tied)
	c.readBiases(r)
	c.readRefused(r)
	c.readDType(r)
	return c
}

func (c *Config) readBiases(r *reader) {
	if b := c.family.biases; c.family.biasField == "" && (b == noBiases || b == qkvBiases) {
		r.accepts("attention_bias") // transformers does not have the field
	}
	c.AttentionBias = r.flag(c.family.biasName(), c.family.biased)
	if name := c.family.mlpBias; name != "" {
		c.MLPBias = r.flag(name, false)
	} else if r.has("mlp_bias") && r.flag("mlp_bias", false) {
		r.fault(status.InvalidConfig, "mlp_bias = true: %s has no biases there; remove it", c.ModelType)
	}
	if c.family.qkNormFlag {
		c.NoQKNorm = !r.flag("use_qk_norm", false)
	}
	switch name, b := c.family.biasName(), c.family.biases; {
	case !c.AttentionBias || b == optionalBiases || b == optionalQKVBiases:
	case b == noBiases && c.family.biasField != "": // transformers has them
		r.fault(status.Unsupported, "%s = true is not built for %s: %s", name, c.ModelType,
			notbuilt.Biases.Instead)
	default:
		has := map[biases]string{qkvBiases: "always has biases on q, k, v and none on o",
			noBiases: "has no biases there"}
		r.fault(status.InvalidConfig, "%s = true: %s %s; remove it", name, c.ModelType, has[b])
	}
}

func (c *Config) readHeads(r *reader) {
	if c.NumKeyValueHeads > 0 && c.NumAttentionHeads%c.NumKeyValueHeads != 0 {
		r.fault(status.InvalidConfig,
			"num_key_value_heads = %d does not divide num_attention_heads = %d: give a divisor of it",
			c.NumKeyValueHeads, c.NumAttentionHeads)
	}
	def := c.family.headDim
	if r.isNull("head_dim") {
		def = 0
	}
	if def == 0 && c.NumAttentionHeads > 0 {
		def = c.HiddenSize / c.NumAttentionHeads
		if !r.has("head_dim") && c.HiddenSize%c.NumAttentionHeads != 0 {
			r.fault(status.InvalidConfig,
				"hidden_size = %d is not a multiple of num_attention_heads = %d: change one, or give head_dim",
				c.HiddenSize, c.NumAttentionHeads)
		}
	}
	c.HeadDim = r.extent("head_dim", max(def, 1), 1<<16)
	if c.HeadDim%2 != 0 && (r.has("head_dim") || c.HiddenSize > 0 && c.NumAttentionHeads > 0) {
		r.fault(status.InvalidConfig, "head_dim = %d is odd, but RoPE rotates pairs of features; set an even head_dim",
			c.HeadDim)
	}
}

// readRefused reads fields that would change the computation in a way that is not built. A value
// other than the neutral one is a fault.
func (c *Config) readRefused(r *reader) {
	if act := c.family.activation; r.text(act.field, act.name) != act.name {
		r.fault(status.Unsupported, "%s = %s is not built: %s", act.field, quoted(r.raw[act.field]),
			notbuilt.Activations.Instead)
	}
	for _, name := range softcapFields {
		if c.family.softcaps {
			break
		}
		if r.has(name) && r.number(name, 0) != 0 {
			r.fault(status.Unsupported, "%s = %v is not built: %s", name, r.raw[name], notbuilt.SoftCaps.Instead)
		}
	}
	c.readDropouts(r)
	c.refuseExperts(r)
	for _, name := range []string{"vision_config", "quantization_config"} {
		if r.has(name) && !(name == "quantization_config" && c.readPacking(r)) {
			r.fault(status.Unsupported, "%s is not built%s: %s", name, quantizedAs(r.raw[name]),
				notbuilt.Multimodal.Instead)
		}
	}
}

// readDropouts reads the probabilities of dropout. A new model has none by default.
func (c *Config) readDropouts(r *reader) {
	def := c.family.dropout
	if r.fresh {
		def = 0
	}
	c.AttentionDropout = r.probability("attention_dropout", def)
	if name := c.family.residualDropout; name != "" {
		c.ResidualDropout = r.probability(name, def)
	}
}

// DropsResiduals returns the field of config.json that makes training drop elements of the outputs
// of sublayers, which is not built; "" = there is none. Other uses of the model have no dropout.
func (c *Config) DropsResiduals() string {
	if c.ResidualDropout == 0 {
		return ""
	}
	return c.family.residualDropout
}

// storage has the element types by their names in config.json.
var storage = map[string]tensor.DType{"float32": tensor.F32, "bfloat16": tensor.BF16, "float16": tensor.F16,
	"float64": tensor.F64}

func (c *Config) readDType(r *reader) {
	checkOwnDType(r, r.raw)
	name := r.text("dtype", r.text("torch_dtype", "float32"))
	var ok bool
	if c.DType, ok = storage[name]; !ok {
		r.fault(status.Unsupported, "dtype = %q is not built: %s", name, notbuilt.StorageTypes.Instead)
	}
}

// checkOwnDType adds a fault if a job sets both names of the type of the weights to different
// values. own has the fields that the job sets.
func checkOwnDType(r *reader, own map[string]any) {
	a, b := own["dtype"], own["torch_dtype"]
	if r.strict && a != nil && b != nil && fmt.Sprint(a) != fmt.Sprint(b) {
		r.fault(status.InvalidConfig, "dtype = %s and torch_dtype = %s: they are names of the same field, give one of them",
			quoted(a), quoted(b))
	}
}
