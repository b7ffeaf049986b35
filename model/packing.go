package model

import "strings"

// packing is the form in which the weights of a folder are quantized.
type packing struct {
	mxfp4, fp8 bool
	block      [2]int64 // rows and columns of a block in FP8 with a scale; 0 = the whole matrix
}

// readPacking reads quantization_config. It reports whether the folder is quantized in a form that
// is read: MXFP4 of gpt-oss, or FP8 with scales of blocks or matrices. The field is not written
// again.
func (c *Config) readPacking(r *reader) bool {
	q, _ := r.raw["quantization_config"].(map[string]any)
	switch method := q["quant_method"]; {
	case method == "mxfp4" && c.stackedExperts():
		c.packing.mxfp4 = true
	case method == "fp8" && isE4M3(q["fmt"]) && c.packing.readBlock(q):
		c.packing.fp8 = true
	default:
		return false
	}
	r.value("quantization_config")
	return true
}

// quantizedAs returns the form that a quantization_config names, for the end of a refusal.
func quantizedAs(config any) string {
	q, _ := config.(map[string]any)
	var all []string
	for _, name := range []string{"quant_method", "fmt", "weight_block_size"} {
		if v, given := q[name]; given && v != nil {
			all = append(all, name+" = "+quoted(v))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return " for " + strings.Join(all, ", ")
}

// isE4M3 reports whether a format is that of F8_E4M3; folders have two names for it.
func isE4M3(format any) bool { return format == nil || format == "e4m3" || format == "float8_e4m3fn" }

// readBlock reads weight_block_size. Null means a scale for each matrix, as in the Instruct models
// of Ministral 3. Without the field, a folder may have scales of another form.
func (p *packing) readBlock(q map[string]any) bool {
	v, given := q["weight_block_size"]
	if given && v == nil {
		return true
	}
	list, _ := v.([]any)
	if len(list) != len(p.block) {
		return false
	}
	for i, x := range list {
		n, ok := asInt(x)
		if !ok || n < 1 || n > maxExtent {
			return false
		}
		p.block[i] = n
	}
	return true
}
