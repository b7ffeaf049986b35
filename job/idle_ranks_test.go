package job

import (
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// A warning before the first step and in a plan names ranks without a head, and the mesh with the
// most planned tokens a second.
func TestIdleRanksAreWarnedOf(t *testing.T) {
	for _, c := range []struct {
		kind, args string
		want       string // "" = no warning
		fixes      []string
	}{
		{"llama", "-n 6", "", nil},
		{"llama", "-n 12 --set parallel.ulysses=6", "", nil},
		{"llama", "-n 12", "parallel.ulysses = 0: 6 of 12 ranks compute no attention, because the model has 6 heads; ",
			[]string{"set parallel.ulysses = 6 (2 replicas)", "set parallel.ulysses = 4 (3 replicas)",
				"set parallel.ulysses = 3 (4 replicas)"}},
		{"llama", "-n 16 --set parallel.ulysses=8", "parallel.ulysses = 8: 4 of 16 ranks compute no attention",
			[]string{"set parallel.ulysses = 4 (4 replicas)", "set parallel.ulysses = 2 (8 replicas)",
				"set parallel.ulysses = 1 (16 replicas)"}},
		// A global batch of one sequence allows no replicas.
		{"llama", "-n 12 --set data.global_batch=1", "6 of 12 ranks compute no attention",
			[]string{"no other mesh of 12 ranks that fits is expected to be faster: start 6 ranks"}},
		{"hybrid", "-n 6 --set gdn.strategy=heads",
			"2 of 6 ranks compute no attention, because the model has 4 heads; ",
			[]string{"set parallel.ulysses = 3 (2 replicas)", "set parallel.ulysses = 2 (3 replicas)",
				"set parallel.ulysses = 1 (6 replicas)"}},
		{"hybrid", "-n 8 --set gdn.strategy=heads --set model.new.layer_types=[\"linear_attention\",\"linear_attention\",\"linear_attention\"]",
			"2 of 8 ranks compute no linear attention, because the model has 6 value heads; ",
			[]string{"set parallel.ulysses = 4 (2 replicas)", "set parallel.ulysses = 2 (4 replicas)",
				"set parallel.ulysses = 1 (8 replicas)"}},
		{"hybrid", "-n 8 --set gdn.strategy=state --set model.new.layer_types=[\"linear_attention\",\"linear_attention\",\"linear_attention\"]",
			"", nil},
	} {
		path := planned(t, c.kind)
		for _, verb := range []string{"plan", "run"} {
			code, out, errs := call(append([]string{verb, path}, strings.Fields(c.args)...)...)
			if code != status.OK {
				t.Fatalf("%s %s: %v\n%s%s", verb, c.args, code, out, errs)
			}
			if c.want == "" {
				if strings.Contains(errs, "ranks compute no") {
					t.Errorf("%s %s: %s", verb, c.args, errs)
				}
				continue
			}
			_, fix, ok := strings.Cut(errs, c.want)
			good := false
			for _, r := range c.fixes {
				good = good || strings.Contains(fix, r)
			}
			good = good ||
				regexp.MustCompile(
					`^.*set parallel.ulysses = [1-6] and parallel.ring = \d+ \(\d+ replicas?\), which`).MatchString(fix)
			if !ok || !good {
				t.Errorf("%s %s: want %q with one of %q in\n%s", verb, c.args, c.want, c.fixes, errs)
			}
			if step := strings.Index(errs, `"message":"train"`); verb == "run" && step >= 0 &&
				step < strings.Index(errs, c.want) {
				t.Errorf("%s: warned after the first step:\n%s", c.args, errs)
			}
		}
	}
}
