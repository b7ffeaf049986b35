package job

import (
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/near"
)

// [[optimizer.group]] sets the weight decay of parameters by name, on every mesh and ZeRO stage: a
// step of SGD subtracts lr · weight_decay · w in addition to the step without weight decay.
func TestDecayGroups(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, "job.toml")
	groups := `optimizer.group=[{match = ["*embed_tokens*"], weight_decay = 0.5}, {match = "re:.*norm.*", weight_decay = 0.25}, {match = ["*.layers.1.*"], weight_decay = 0}]`
	value := func(name string) float64 {
		switch {
		case strings.Contains(name, "embed_tokens"):
			return 0.5
		case strings.Contains(name, "norm"):
			return 0.25
		case strings.Contains(name, ".layers.1."):
			return 0
		}
		return 0.125
	}
	updated := func(ranks string, sets ...string) map[string][]float32 {
		t.Helper()
		path := filepath.Join(t.TempDir(), "step.safetensors")
		args := []string{"verify", job, "-n", ranks, "--tensors", path}
		for _, s := range append([]string{"optimizer.name=sgd", "optimizer.schedule=constant", "optimizer.warmup=0"},
			sets...) {
			args = append(args, "--set", s)
		}
		if code, out, errs := call(args...); code != status.OK {
			t.Fatalf("%v: %v\n%s%s", args, code, out, errs)
		}
		all := map[string][]float32{}
		for name, x := range readTensors(t, path) {
			if name, ok := strings.CutSuffix(name, " updated"); ok {
				all[name] = x
			}
		}
		return all
	}
	before := updated("1", "optimizer.lr=0")
	for _, mesh := range [][]string{{"1"}, {"2", "parallel.ulysses=2", "parallel.zero=0"},
		{"4", "parallel.ulysses=2", "parallel.zero=2"}, {"4", "parallel.ulysses=2", "parallel.zero=3"}} {
		sets := append([]string{"optimizer.lr=0.5"}, mesh[1:]...)
		without, with := updated(mesh[0], sets...),
			updated(mesh[0], append(sets, groups, "optimizer.weight_decay=0.125")...)
		if len(with) != len(before) || len(with) < 10 {
			t.Fatalf("%d tensors, before %d", len(with), len(before))
		}
		for name, x := range with {
			for i := range x {
				near.Value(t, name, float64(x[i]), float64(without[name][i])-0.5*value(name)*float64(before[name][i]),
					1e-6)
			}
		}
	}
}

// Faults of groups are refused, and a changed group is a changed setting of a resumed run.
func TestDecayGroupFaults(t *testing.T) {
	dir, run := newKept(t)
	for set, want := range map[string]string{
		`optimizer.group=[{match = ["*embedding*"], weight_decay = 0}]`:  `optimizer.group: "*embedding*" matches no trained parameter of the model`,
		`optimizer.group=[{match = ["re:("], weight_decay = 0}]`:         "optimizer.group: match has no patterns of names",
		`optimizer.group=[{match = [], weight_decay = 0}]`:               "optimizer.group: match has no patterns of names",
		`optimizer.group=[{match = ["*"]}]`:                              "optimizer.group.weight_decay: missing",
		`optimizer.group=[{match = ["*"], weight_decay = -1}]`:           "optimizer.group.weight_decay = -1: must be at least 0",
		`optimizer.group=[{match = ["*"], weight_decay = 0, lr = 1e-3}]`: "optimizer.group.lr: unknown key",
	} {
		_, err := run(2, set)
		expectFault(t, err, status.InvalidConfig, []string{want})
	}
	group := `optimizer.group=[{match = ["*norm*"], weight_decay = 0.5}]`
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	drop(t, dir, 6)
	_, err := run(1, group)
	expectFault(t, err, status.InvalidConfig,
		[]string{"optimizer.group is [{[*norm*] 0.5}], it was []", `set checkpoint.accept = ["optimizer.group"]`})
	if _, err := run(1, group, "checkpoint.accept=optimizer.group"); err != nil {
		t.Error(err)
	}
}
