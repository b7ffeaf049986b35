package job

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/near"
)

// newDivided is newKept with five experts in the first and the third of three layers.
func newDivided(t *testing.T, sets ...string) (dir string, run func(ranks int, sets ...string) (string, error)) {
	return newKept(t, append([]string{newDividedModel()}, sets...)...)
}

// A checkpoint of divided experts is resumed with other divisions and without one, on other meshes
// and ZeRO stages, and the other way round. Bits are the same on the same mesh; losses are equal on
// others. The model folder and an export have the same tensors in the same order. The biases of
// experts are saved and resumed as well.
func TestCheckpointsOfDividedExperts(t *testing.T) {
	checkpointsOfDividedExperts(t, "checkpoint.keep=9")
	checkpointsOfDividedExperts(t, "checkpoint.keep=9", "optimizer.expert_bias_rate=0.05")
}

func checkpointsOfDividedExperts(t *testing.T, sets ...string) {
	dir, run := newDivided(t, sets...)
	folder := filepath.Join(dir, "out", "model", "model.safetensors")
	header := func() string {
		text, err := os.ReadFile(folder)
		if err != nil {
			t.Fatal(err)
		}
		return string(text[8:bytes.Index(text, []byte("}}"))])
	}
	if _, err := run(1, "parallel.ulysses=1"); err != nil {
		t.Fatal(err)
	}
	one, layout := losses(t, dir), header()
	if !(one[5] < one[0]) {
		t.Fatalf("the loss does not decrease: %v", one)
	}
	first := []string{"parallel.ulysses=4", "parallel.experts=4", "parallel.zero=3"}
	for i, x := range []struct {
		ranks int
		sets  []string
	}{
		{4, first}, {4, first}, // the second one has the same bits
		{4, []string{"parallel.ulysses=2", "parallel.experts=2", "parallel.zero=1"}},
		{2, []string{"parallel.ulysses=1", "parallel.experts=2"}},
		{1, []string{"parallel.ulysses=1"}},
		{3, []string{"parallel.ulysses=3", "parallel.experts=3", "parallel.zero=2"}},
		{4, []string{"parallel.ulysses=1", "parallel.zero=3"}},
		{4, []string{"parallel.ulysses=2", "parallel.ring=2", "parallel.experts=4", "parallel.zero=2"}},
	} {
		before, _ := os.ReadFile(folder)
		drop(t, dir, 4, 6)
		if _, err := run(x.ranks, x.sets...); err != nil {
			t.Fatalf("%v, %+v: %v", sets, x, err)
		}
		near.Slice(t, fmt.Sprintf("%v, %+v: losses", sets, x), losses(t, dir), one, 1e-5)
		if header() != layout {
			t.Errorf("%v, %+v: the model folder has other tensors:\n%s\non one rank\n%s", sets, x, header(), layout)
		}
		if after, _ := os.ReadFile(folder); i == 1 && !bytes.Equal(before, after) {
			t.Errorf("%v, %+v: the weights have other bits after a resume", sets, x)
		}
		exported := filepath.Join(t.TempDir(), "exported")
		exports(t, filepath.Join(dir, "out", "checkpoints"), exported, "after step 6")
		a, b := readTensors(t, filepath.Join(exported, "model.safetensors")), readTensors(t, folder)
		if len(a) != len(b) {
			t.Errorf("%v, %+v: the export has %d tensors, the run's folder %d", sets, x, len(a), len(b))
		}
		for name, values := range b {
			if !slices.Equal(values, a[name]) {
				t.Errorf("%v, %+v: %s of the export differs", sets, x, name)
			}
		}
	}
}

// Samples and evaluations in a run with divided experts equal the ones on one rank, also if some
// ranks have no sequence to evaluate.
func TestEvaluationsWithDividedExperts(t *testing.T) {
	sets := []string{"optimizer.expert_bias_rate=0.05", "eval.every=2", `eval.sample=["the cat "]`,
		"eval.sample_tokens=8", "data.pack=false"}
	var want []sampleLine
	var loss []float64
	for _, x := range []struct {
		ranks int
		sets  []string
	}{
		{1, []string{"parallel.ulysses=1"}}, {2, []string{"parallel.ulysses=2", "parallel.experts=2"}},
		{4, []string{"parallel.ulysses=2", "parallel.experts=4", "parallel.zero=3"}},
		{4, []string{"parallel.ulysses=4", "parallel.experts=2", "parallel.zero=1"}},
	} {
		dir, _ := newDivided(t)
		var files []string
		for i, text := range []string{"the cat sat.\n",
			"a longer line about the mat on which a cat has sat for a while\n", "so it goes, on and on\n"} {
			files = append(files, fmt.Sprintf("%q", filepath.Join(dir, fmt.Sprintf("eval%d.txt", i))))
			put(t, filepath.Join(dir, fmt.Sprintf("eval%d.txt", i)), text)
		}
		all := append([]string{newDividedModel(), "eval.path=[" + strings.Join(files, ",") + "]"},
			append(slices.Clone(sets), x.sets...)...)
		got := sampled(t, dir, opener{}, x.ranks, all...)
		var losses []float64
		for _, e := range readEvals(t, dir) {
			losses = append(losses, *e.Loss)
		}
		if want == nil {
			want, loss = got, losses
			if len(want) != 3 || len(loss) != 3 {
				t.Fatalf("samples %v, evaluations %v", want, loss)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%+v: samples %+v, on one rank %+v", x, got, want)
		}
		near.Slice(t, fmt.Sprintf("%+v: losses of evaluations", x), losses, loss, 1e-5)
	}
}

// newDividedModel returns the setting of newDivided's model.
func newDividedModel() string {
	return strings.Join(
		strings.Fields(`model.new={model_type="qwen3_moe", vocab_size=256, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
		head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[1], output_router_logits=true, router_aux_loss_coef=0.01}`), " ")
}

// Adapters and frozen parameters beside divided experts: losses equal the losses of one rank, and
// the adapters are saved, merged and resumed. verify compares the ranks with one.
func TestAdaptersWithDividedExperts(t *testing.T) {
	for _, freeze := range []string{"lora.dropout=0.1", "lora.targets=[\"q_proj\",\"shared_expert.up_proj\"]"} {
		dir, _, run := newLoRA(t, "qwen3_5_moe")
		if _, err := run(1, freeze, "parallel.ulysses=1"); err != nil {
			t.Fatal(err)
		}
		want := losses(t, dir)
		for _, sets := range [][]string{{"parallel.experts=2", "parallel.zero=3"},
			{"parallel.experts=4", "parallel.ulysses=2", "parallel.zero=1"}} {
			drop(t, dir, 2, 3)
			if _, err := run(4, append([]string{freeze}, sets...)...); err != nil {
				t.Fatal(err)
			}
			near.Slice(t, fmt.Sprintf("%s %v: losses", freeze, sets), losses(t, dir), want, 1e-5)
			merged := filepath.Join(t.TempDir(), "merged")
			if code, _, errs := call("export", "--merge", filepath.Join(dir, "out", "checkpoints"),
				merged); code != status.OK {
				t.Fatalf("export --merge: %v: %s", code, errs)
			}
		}
	}
	dir, _ := newDivided(t)
	for _, sets := range []string{"parallel.experts=2 parallel.ulysses=2 parallel.zero=3",
		"parallel.experts=4 parallel.ulysses=1 train.freeze=[\"*.experts.*\"]"} {
		args := []string{"verify", filepath.Join(dir, "job.toml"), "-n", "4", "--set", newDividedModel(), "--set",
			"optimizer.name=sgd"}
		for _, set := range strings.Fields(sets) {
			args = append(args, "--set", set)
		}
		if code, out, errs := call(args...); code != status.OK {
			t.Errorf("%s: %v: %s %s", sets, code, out, errs)
		}
	}
}
