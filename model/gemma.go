package model

import (
	"math"

	"ulysses/device"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// mostSlide is the rule of Gemma 3: of every sliding_window_pattern layers, the last has full
// attention.
func mostSlide(r *reader, window int64) func(int64) string {
	pattern := r.extent("sliding_window_pattern", 6, maxLayers)
	return func(layer int64) string { return slidingIf(window > 0 && (layer+1)%pattern != 0) }
}

// readGemma2 reads the fields of Gemma 2 (Gemma Team 2024, arXiv:2408.00118).
func readGemma2(c *Config, r *reader) {
	readGemma(c, r)
	c.ScoreSoftcap, c.LogitSoftcap = r.softcap("attn_logit_softcapping", 50), r.softcap("final_logit_softcapping", 30)
}

// readGemma3 reads the fields of Gemma 3 (Gemma Team 2025, arXiv:2503.19786). As in transformers,
// attn_logit_softcapping has no effect: attention does not get it.
func readGemma3(c *Config, r *reader) {
	readGemma(c, r)
	r.ineffective("attn_logit_softcapping", "remove it")
	c.LogitSoftcap = r.softcap("final_logit_softcapping", 0)
}

func readGemma(c *Config, r *reader) {
	c.ScoreScale = 1 / math.Sqrt(r.positive("query_pre_attn_scalar", 256))
	if v := r.value("use_bidirectional_attention"); v != nil && v != false {
		r.fault(status.Unsupported, "use_bidirectional_attention = %v is not built: %s", v,
			notbuilt.BidirectionalModels.Instead)
	}
}

// softcap reads the cap of scores or logits. null and 0 are no cap; a field that is missing is def.
func (r *reader) softcap(name string, def float64) float64 {
	if r.accepts(name); r.isNull(name) {
		def = 0
	}
	x := r.number(name, def)
	if !device.IsSoftcap(x) {
		r.fault(status.InvalidConfig, "%s = %v: give a number from %v to %v, or 0 for no cap", name, x,
			device.MinSoftcap, device.MaxSoftcap)
		return 0
	}
	return x
}

// writeGemma writes null for a cap of 0, by which transformers would divide.
func writeGemma(_ *Config, f fields) {
	for _, name := range softcapFields {
		if x, given := asFloat(f[name]); given && x == 0 {
			f[name] = nil
		}
	}
}

// softcapFields are the caps of scores and of logits.
var softcapFields = []string{"attn_logit_softcapping", "final_logit_softcapping"}
