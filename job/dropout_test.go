package job

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Dropout of attention drops the same weights on every mesh, with every policy for activations and
// in groups of heads: losses are the losses of one rank within the rounding of F32. It changes with
// the seed.
func TestDropoutIsTheSameOnEveryMesh(t *testing.T) {
	for _, name := range []string{"llama-sgd-packed", "qwen3-sgd-packed", "qwen3_5-sgd-packed"} {
		path := filepath.Join(goldens, name, "job.toml")
		with := "model.override={attention_dropout=0.3}"
		want, _ := trained(t, path, 1, with, "parallel.ulysses=1", "data.global_batch=4")
		again, _ := trained(t, path, 1, with, "parallel.ulysses=1", "data.global_batch=4")
		none, _ := trained(t, path, 1, "parallel.ulysses=1", "data.global_batch=4")
		other, _ := trained(t, path, 1, with, "parallel.ulysses=1", "data.global_batch=4", "seed=99")
		if !slices.Equal(want, again) {
			t.Errorf("%s: losses %v, and when repeated %v", name, want, again)
		}
		for i := range want {
			if want[i] == none[i] || want[i] == other[i] {
				t.Errorf("%s: step %d: loss %v, without dropout %v, with another seed %v", name, i+1, want[i], none[i],
					other[i])
			}
		}
		for _, m := range []struct {
			ranks, ulysses, ring int
			sets                 string
		}{
			{2, 2, 1, ""}, {4, 2, 2, "parallel.zero=3"}, {3, 1, 3, ""}, {4, 2, 1, ""}, {2, 1, 1, "parallel.zero=1"},
			{2, 2, 1, "memory.attention=recompute"},
			{2, 2, 1, "memory.head_groups=2"}, {4, 2, 2, "parallel.overlap=on"},
		} {
			if strings.Contains(m.sets, "groups") && name != "llama-sgd-packed" { // others have one key head
				continue
			}
			sets := append([]string{with, fmt.Sprintf("parallel.ulysses=%d", m.ulysses),
				fmt.Sprintf("parallel.ring=%d", m.ring), "data.global_batch=4"}, strings.Fields(m.sets)...)
			got, _ := trained(t, path, m.ranks, sets...)
			for i := range want {
				if d := math.Abs(got[i] - want[i]); !(d <= 2e-6*want[i]) {
					t.Errorf("%s on %v: step %d: loss %v, on one rank %v", name, sets, i+1, got[i], want[i])
				}
			}
		}
	}
}

// Each step drops other weights: steps over the same sequences with the same weights of the model
// have different losses. Without dropout they differ by rounding alone.
func TestDropoutOfEachStep(t *testing.T) {
	for _, x := range []struct {
		dropout string
		least   float64
		most    float64
	}{{"0.3", 1e-4, 1}, {"0.0", 0, 1e-6}} {
		dir, run := newKept(t, "model.override={attention_dropout="+x.dropout+"}", "optimizer.lr=0.0",
			"optimizer.weight_decay=0.0", "checkpoint.every=0", "output.model=false")
		text := strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 4)
		put(t, filepath.Join(dir, "a.txt"), text[:4*48-1]) // four sequences, the global batch
		if _, err := run(1); err != nil {
			t.Fatal(err)
		}
		all := losses(t, dir)
		for i, l := range all {
			for _, other := range all[:i] {
				if d := math.Abs(l - other); !(d >= x.least && d <= x.most) {
					t.Errorf("dropout %s: losses %v of the steps", x.dropout, all)
				}
			}
		}
	}
}

// A published Seed-OSS has dropout of residuals, which is not built. Only training needs it: the
// folder is evaluated and continues a text, and init writes a job without it.
func TestResidualDropout(t *testing.T) {
	path := fromScratch(t, `
model_type = "seed_oss"
vocab_size = 256
hidden_size = 24
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 3
num_key_value_heads = 1
head_dim = 8
`, "")
	dir := filepath.Dir(path)
	t.Chdir(dir)
	if code, _, errs := call(path, "--set", "train.steps=1", "--set", "optimizer.warmup=0", "-q"); code != status.OK {
		t.Fatalf("%v: %s", code, errs)
	}
	folder := filepath.Join("out", "model")
	config := filepath.Join(folder, "config.json")
	put(t, config, strings.Replace(text(t, config), `"residual_dropout": 0.0`, `"residual_dropout": 0.1`, 1))

	of := []string{"--set", "model.new={}", "--set", "model.path=" + folder, "--set", "output.dir=other", "-q"}
	code, _, errs := call(append([]string{path}, of...)...)
	if code != status.Unsupported ||
		!strings.Contains(errs, "residual_dropout = 0.1 is not built for training: set it to 0 with model.override") {
		t.Errorf("training: %v: %s", code, errs)
	}
	if code, _, errs := call(append([]string{"eval", path, folder}, of...)...); code != status.OK {
		t.Errorf("eval: %v: %s", code, errs)
	}
	if code, _, errs := call("generate", folder, "the", "--max-tokens", "2"); code != status.OK {
		t.Errorf("generate: %v: %s", code, errs)
	}
	if code, _, errs := call("init", folder, "-o", "new.toml"); code != status.OK {
		t.Fatalf("init: %v: %s", code, errs)
	}
	put(t, "train.jsonl", `{"text": "the cat sat on the mat, and the dog sat on the log."}`)
	if code, _, errs := call("plan", "new.toml", "--set", "eval.split=0.0"); code != status.OK {
		t.Errorf("plan: %v: %s", code, errs)
	}
}
