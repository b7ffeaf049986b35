package model

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/models.md")

// TestTable compares docs/models.md with the families. -update writes it.
func TestTable(t *testing.T) {
	const path = "../docs/models.md"
	text := table()
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != text {
		t.Errorf("%s differs from the families (%v): run go test ./model -run TestTable -update", path, err)
	}
}

func table() string {
	lines := []string{"# Models", "",
		"These are the values of `model_type` in a `config.json`, or in `[model.new]`, that the program",
		"trains. `go test ./model -run TestTable -update` writes this page from the table that the program",
		"reads. `python/tests/test_parity.py` compares each of them with transformers: logits, loss,",
		"gradients, five steps, and saved folders, on several meshes.", "",
		"| model_type | class in transformers | norms of a layer | q and k | attention | MLP | RoPE | in files |",
		"|---|---|---|---|---|---|---|---|"}
	for _, name := range ModelTypes() {
		f := families[name]
		lines = append(lines,
			"| "+strings.Join([]string{"`" + name + "`", "`" + f.class + "`", f.norms.text(), f.queries(),
				f.attention(), f.mlp(), f.rotation(), f.inFiles()}, " | ")+" |")
	}
	return strings.Join(append(lines, ""), "\n")
}

func (n norms) text() string {
	switch {
	case n.mixer == "":
		return "after"
	case n.mixerOut != "":
		return "before and after"
	}
	return "before"
}

func (f *family) queries() string {
	if f.latent {
		return "compressed, with norms; biases of the compressions and of the output if `attention_bias`"
	}
	all := []string{map[biases]string{optionalBiases: "biases if `" + f.biasName() + "`, also of the output",
		qkvBiases: "biases", optionalQKVBiases: "biases if `" + f.biasName() + "`",
		noBiases: "no biases"}[f.biases]}
	if f.qkNorm {
		norm := "a norm of each head"
		if f.qkNormFlag {
			norm += " if `use_qk_norm`"
		}
		all = append(all, norm)
	}
	if f.wholeNorm {
		all = append(all, "a norm over all heads")
	}
	return strings.Join(all, "; ")
}

func (f *family) attention() string {
	var all []string
	for _, x := range []struct {
		has  bool
		text string
	}{
		{f.window > 0 && !f.noWindow && !f.windowFlag, fmt.Sprintf("windows of `sliding_window` (%d)", f.window)},
		{f.noWindow && !f.windowFlag, "windows of `sliding_window`, if it is set"},
		{f.windowFlag, "windows if `use_sliding_window`"},
		{slices.Contains(f.kinds, linearAttention), "gated delta rule in most layers"},
		{f.latent, "latent (MLA)"}, {f.outputGate, "output gate"}, {f.sinks, "sinks"}, {f.softcaps, "soft caps"},
	} {
		if x.has {
			all = append(all, x.text)
		}
	}
	return cmp.Or(strings.Join(all, "; "), "full")
}

func (f *family) mlp() string {
	text := "SwiGLU"
	if f.activation.gelu {
		text = "GELU gate"
	}
	if f.mlpBias != "" {
		text += "; biases if `" + f.mlpBias + "`"
	}
	if x := f.experts; x != nil {
		text += " of experts"
		if x.stacked {
			text += ", clamped, with biases"
		}
		if x.grouped {
			text += " in groups"
		}
		if x.sigmoid {
			text += ", chosen by sigmoids and biases"
		} else if x.biased {
			text += ", chosen with biases"
		}
		if x.shared {
			text += ", one of all tokens with a gate"
		} else if x.sharedCount != "" {
			text += ", one of all tokens"
		}
		text += map[sparseRule]string{
			sparseUnlisted: "; dense in layers of `mlp_only_layers`",
			sparseAfter:    "; dense in the first `first_k_dense_replace` layers",
			sparseBetween:  "; dense outside of `moe_layer_start_index` to `moe_layer_end_index`",
			sparseListed:   "; dense in layers of `mlp_layer_types`",
		}[x.sparse]
	}
	return text
}

func (f *family) rotation() string {
	text := fmt.Sprintf("theta %g", f.theta)
	if f.localTheta > 0 {
		text += fmt.Sprintf(", of windows %g", f.localTheta)
	}
	if f.rotaryShare > 0 {
		text += fmt.Sprintf("; `partial_rotary_factor` %g", f.rotaryShare)
	}
	if f.latent {
		text += "; the last `qk_rope_head_dim` features of a head"
	}
	if f.queryGain {
		text += "; queries times a gain of their position (`llama_4_scaling_beta`)"
	}
	if f.files.pairs {
		text += "; neighbours are rotated"
	} else if f.latent {
		text += ", neighbours if `rope_interleave`"
	}
	return text
}

func (f *family) inFiles() string {
	if f.fusedLinear {
		return "`in_proj_qkvz` and `in_proj_ba` of linear attention"
	}
	return f.files.text()
}

func (f *files) text() string {
	var all []string
	for _, x := range f.fused {
		all = append(all, "`"+x.name[strings.Index(x.name, ".")+1:]+"` is one matrix")
	}
	if f.outer != "" {
		all = append(all, "also of `"+f.outer+"`, without vision")
	}
	return cmp.Or(strings.Join(all, "; "), "-")
}
