package model

import (
	"cmp"
	"math"

	"ulysses/internal/status"
)

// Latent has the fields of a decoder with multi-head latent attention (DeepSeek-AI 2024,
// arXiv:2405.04434, section 2.1). Keys and values of all heads are computed from one compressed
// vector of a token, and queries from another one. A head of q and k has features without and with
// RoPE. The features of k with RoPE are the same in all heads.
type Latent struct {
	QLoraRank  int64 `json:",omitempty"` // features of the compressed queries; 0 = queries are not compressed
	KVLoraRank int64 `json:",omitempty"` // features of the compressed keys and values; 0 = no latent attention
	// features of a head of q and k without RoPE and with it, and of a head of v
	QKNopeHeadDim, QKRopeHeadDim, VHeadDim int64 `json:",omitempty"`
	// In the files, the rotated features 2i and 2i + 1 of a head belong together (rope_interleave;
	// in DeepSeek-V2 always).
	RopeInterleave bool `json:",omitempty"`
}

// IsLatent reports whether the softmax attention of the model is latent attention.
func (c *Config) IsLatent() bool { return c.KVLoraRank > 0 }

// ValueDim returns the features of a head of v in softmax attention. Heads of q and k have HeadDim.
func (c *Config) ValueDim() int64 { return cmp.Or(c.VHeadDim, c.HeadDim) }

// HeadFeatures returns the features of all heads of q, k and v of a token in softmax attention.
func (c *Config) HeadFeatures() int64 {
	return (c.NumAttentionHeads+c.NumKeyValueHeads)*c.HeadDim + c.NumKeyValueHeads*c.ValueDim()
}

// rotatable returns the features of a head that may be rotated.
func (c *Config) rotatable() int64 { return cmp.Or(c.QKRopeHeadDim, c.HeadDim) }

// readLatent reads the sizes of heads. HeadDim is the size of a head of q and k. head_dim of a
// config.json is the number of rotated features, or missing.
func (c *Config) readLatent(r *reader) {
	extent := func(name string) int64 { return r.extent(name, c.family.size(name, r), 1<<16) }
	_, given := r.raw["q_lora_rank"]
	rank := r.value("q_lora_rank")
	n, ok := asInt(rank)
	none := given && rank == nil || ok && n == 0 || !given && r.fresh // TOML has no null
	if !none {
		c.QLoraRank = extent("q_lora_rank")
	}
	c.KVLoraRank = extent("kv_lora_rank")
	c.QKNopeHeadDim, c.QKRopeHeadDim = extent("qk_nope_head_dim"), extent("qk_rope_head_dim")
	c.VHeadDim = extent("v_head_dim")
	c.RopeInterleave = c.family.files.pairs || r.flag("rope_interleave", true)
	c.HeadDim = c.QKNopeHeadDim + c.QKRopeHeadDim
	if c.QKRopeHeadDim%2 != 0 {
		r.fault(status.InvalidConfig,
			"qk_rope_head_dim = %d is odd, but RoPE rotates pairs of features; set an even qk_rope_head_dim",
			c.QKRopeHeadDim)
	}
	if c.NumKeyValueHeads != c.NumAttentionHeads {
		r.fault(status.InvalidConfig,
			"num_key_value_heads = %d, num_attention_heads = %d: each head of latent attention has its own keys and values; set both to the same number",
			c.NumKeyValueHeads, c.NumAttentionHeads)
	}
	r.ineffective("head_dim", "set qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
}

// widestHead returns the size of the largest head of softmax attention, with its fields.
func (c *Config) widestHead() (fields string, dim int64) {
	switch {
	case !c.IsLatent():
		return "head_dim", c.HeadDim
	case c.VHeadDim > c.HeadDim:
		return "v_head_dim", c.VHeadDim
	}
	return "qk_nope_head_dim + qk_rope_head_dim", c.HeadDim
}

// scaleLatent sets the scale of scores: with RoPE that is scaled and mscale_all_dim, the product is
// multiplied by the square of YaRN's factor.
func (c *Config) scaleLatent() {
	c.ScoreScale = cmp.Or(c.Rope.ScoreGain, 1) / math.Sqrt(float64(c.HeadDim))
}

func writeLatent(c *Config, f fields) {
	if c.QLoraRank > 0 {
		f.put("q_lora_rank", c.QLoraRank)
	} else {
		f["q_lora_rank"] = nil
	}
	f.put("kv_lora_rank", c.KVLoraRank)
	f.put("qk_nope_head_dim", c.QKNopeHeadDim)
	f.put("qk_rope_head_dim", c.QKRopeHeadDim)
	f.put("v_head_dim", c.VHeadDim)
	if !c.family.files.pairs {
		f.put("rope_interleave", c.RopeInterleave)
	}
	f["head_dim"] = c.QKRopeHeadDim
	writeExperts(c, f)
}

// latentWeights returns the number of weights of the projections before attention in a layer: of
// the projections that compress, and of the projections that compute the heads of q, k and v.
func (c *Config) latentWeights() (compress, expand float64) {
	queries, h := c.NumAttentionHeads*c.HeadDim, c.HiddenSize
	compress = float64(h * (c.KVLoraRank + c.QKRopeHeadDim + c.QLoraRank))
	expand = float64(c.KVLoraRank * c.NumAttentionHeads * (c.QKNopeHeadDim + c.VHeadDim))
	return compress, expand + float64(queries*cmp.Or(c.QLoraRank, h))
}
