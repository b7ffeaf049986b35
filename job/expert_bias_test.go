package job

import (
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// expertLoads returns expert_load of each step of a run.
func expertLoads(t *testing.T, dir string) (all []float64) {
	for _, r := range readMetrics(t, filepath.Join(dir, "out", "metrics.jsonl")) {
		all = append(all, *r.ExpertLoad)
	}
	return all
}

// With a learning rate of 0 the biases alone change. They balance the loads, with the same loads on
// every mesh, for every number of micro-batches and after a resume.
func TestExpertBias(t *testing.T) {
	sets := []string{"optimizer.expert_bias_rate=0.0005", "optimizer.lr=0.0", "optimizer.weight_decay=0.0",
		"data.global_batch=16", "checkpoint.every=20", "checkpoint.keep=9", "train.steps=60"}
	var want []float64
	for _, x := range []struct {
		ranks int
		sets  []string
	}{
		{1, []string{"parallel.ulysses=1"}}, {1, []string{"parallel.ulysses=1", "data.batch=4"}},
		{4, []string{"parallel.ulysses=2", "parallel.experts=2", "parallel.zero=2"}},
		{4, []string{"parallel.ulysses=1", "data.batch=1"}}, {3, []string{"parallel.ulysses=3", "tile.mlp=5"}},
	} {
		dir, run := newDivided(t, sets...)
		if _, err := run(x.ranks, x.sets...); err != nil {
			t.Fatalf("%+v: %v", x, err)
		}
		loads := expertLoads(t, dir)
		if want == nil {
			want = loads
			mean := func(x []float64) (sum float64) {
				for _, v := range x {
					sum += v / float64(len(x))
				}
				return sum
			}
			before, after := mean(loads[:5]), mean(loads[55:])
			if !(after < 1.4 && after < 0.75*before) {
				t.Errorf("the largest load is %.3f in the first steps and %.3f in the last", before, after)
			}
		}
		if !slices.Equal(loads, want) {
			t.Errorf("%+v: loads %v, on one rank %v", x, loads, want)
		}
		if x.ranks != 4 {
			continue
		}
		// the steps after a resume, on one rank
		drop(t, dir, 40, 60)
		if _, err := run(1, "parallel.ulysses=1"); err != nil {
			t.Fatal(err)
		}
		if again := expertLoads(t, dir); !slices.Equal(again, want) {
			t.Errorf("%+v: loads after a resume %v, want %v", x, again, want)
		}
	}
}

// A run with biases of experts, its checkpoint, its model folder and an export have the same
// evaluation. A run that resumes with a rate of 0 keeps the biases, and another rate needs
// checkpoint.accept.
func TestExpertBiasIsKept(t *testing.T) {
	dir, run := newDivided(t, "optimizer.expert_bias_rate=0.1", "eval.every=6", "eval.split=0.2", "checkpoint.every=6",
		"checkpoint.keep=9")
	if _, err := run(2, "parallel.ulysses=2", "parallel.zero=3"); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	exported := filepath.Join(t.TempDir(), "exported")
	exports(t, filepath.Join(out, "checkpoints"), exported, "after step 6")
	all := readEvals(t, dir)
	want := *all[len(all)-1].Loss
	of := func(path string, sets ...string) float64 {
		t.Helper()
		return *evaluatedWith(t, dir, path, 1, append([]string{newDividedModel(), "eval.split=0.2"}, sets...)...).Loss
	}
	biased := "model.new.use_expert_bias=true"
	folder, export := of(filepath.Join(out, "model")), of(exported)
	kept := of(filepath.Join(out, "checkpoints"), biased)
	if export != folder || !(math.Abs(folder-want) <= 2e-6) || !(math.Abs(kept-want) <= 2e-6) {
		t.Errorf("the loss is %v in the run, %v of its folder, %v of an export, %v of the checkpoint", want, folder,
			export, kept)
	}
	biases := func() map[string][]float32 {
		found := readTensors(t, filepath.Join(out, "model", "model.safetensors"))
		maps.DeleteFunc(found, func(name string, _ []float32) bool {
			return !strings.HasSuffix(name, "gate.e_score_correction_bias")
		})
		return found
	}
	first := biases()
	if len(first) != 2 || len(first["model.layers.2.mlp.gate.e_score_correction_bias"]) != 5 {
		t.Fatalf("biases %v", first)
	}
	_, err := run(2, "parallel.ulysses=2", "optimizer.expert_bias_rate=0", "train.steps=8",
		"optimizer.schedule=constant")
	if code := status.Of(err); code != status.InvalidConfig ||
		!strings.Contains(err.Error(), `optimizer.expert_bias_rate is 0, it was 0.1`) {
		t.Errorf("another rate: %v", err)
	}
	_, err = run(2, "parallel.ulysses=2", "optimizer.expert_bias_rate=0", "train.steps=8",
		"optimizer.schedule=constant",
		`checkpoint.accept=["optimizer.expert_bias_rate", "optimizer.schedule", "optimizer.min_lr", "train.steps"]`)
	if err != nil {
		t.Fatal(err)
	}
	if after := biases(); !slices.Equal(after["model.layers.2.mlp.gate.e_score_correction_bias"],
		first["model.layers.2.mlp.gate.e_score_correction_bias"]) {
		t.Errorf("biases %v, before the resume with a rate of 0 %v", after, first)
	}
}
