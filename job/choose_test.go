package job

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/tensorfile"
)

// A run with parallel.ulysses = 0 prints the mesh with the reason, keeps the sequences of a step,
// and has the losses of one rank. A plan chooses the same mesh.
func TestRunChoosesItsMesh(t *testing.T) {
	path := filepath.Join(goldens, "qwen3-sgd-packed", "job.toml")
	const sets = "parallel.ulysses=0 data.global_batch=4 data.batch=1"
	want, _ := trained(t, path, 1, strings.Fields(sets)...)
	for _, more := range []string{"", " parallel.ring=2", " parallel.ring=1"} {
		got, _ := trained(t, path, 4, strings.Fields(sets+more)...)
		for i := range want {
			if d := math.Abs(got[i] - want[i]); !(d <= 2e-6*want[i]) {
				t.Errorf("%s: step %d: loss %v, on one rank %v", more, i+1, got[i], want[i])
			}
		}
	}
	line := regexp.MustCompile(
		`mesh: (ulysses \d+(?: x ring \d+)? x data \d+): 4 ranks, 4 a node, \d+ query heads?, 4 sequences a step`)
	var log bytes.Buffer
	o := Options{Path: path, Sets: append(strings.Fields(sets), "output.dir="+t.TempDir(), "output.model=false"),
		Ranks: 4, Stdout: io.Discard, Stderr: &log}
	if err := Run(o); err != nil {
		t.Fatal(err, log.String())
	}
	ran := line.FindStringSubmatch(log.String())
	args := []string{"plan", path, "-n", "4"}
	for _, set := range strings.Fields(sets) {
		args = append(args, "--set", set)
	}
	code, out, errs := call(args...)
	planned := line.FindStringSubmatch(out)
	if code != status.OK || ran == nil || planned == nil || ran[1] != planned[1] ||
		!strings.Contains(out, "4 ranks, "+planned[1]+", zero") {
		t.Errorf("the run has %q, the plan %q:\n%s%s%s", ran, planned, log.String(), out, errs)
	}
}

// operatorJob writes a job of a kind on an input with few heads, and returns its path.
func operatorJob(t *testing.T, kind string) string {
	t.Helper()
	shapes := map[string][]int64{"q": {2048, 2, 8}, "k": {2048, 2, 8}, "v": {2048, 2, 8}, "dout": {2048, 2, 8}}
	values := map[string]float32{"q": 0.5, "k": 0.25, "v": 1, "dout": 1}
	if kind == "gdn" {
		shapes["g"], shapes["beta"] = []int64{2048, 2}, []int64{2048, 2}
		values["g"], values["beta"] = -0.5, 0.5
	}
	path := filepath.Join(t.TempDir(), "job.toml")
	put(t, path, fmt.Sprintf(
		"kind = %q\ndevice = {backend = \"cpu\", threads = 1}\n%s = {input = %q, output = \"out.safetensors\"}\n", kind,
		kind, tensorfile.Filled(t, shapes, values, nil)))
	return path
}

// Attention jobs with parallel.ulysses = 0 choose their mesh as training does: with more ranks than
// heads, a ring leaves no rank idle. The plan makes the same choice, and a ring of the job is kept.
func TestOperatorChoosesItsMesh(t *testing.T) {
	path := operatorJob(t, "attention")
	line := regexp.MustCompile(
		`mesh: (ulysses \d+(?: x ring \d+)? x data 1): 4 ranks, 4 a node, 2 query heads of 2\W048 tokens`)
	for sets, want := range map[string]string{"": `^ulysses (2 x ring 2|1 x ring 4) x data 1$`,
		"parallel.ring=4": `^ulysses 1 x ring 4 x data 1$`, "parallel.ring=1": `^ulysses 4 x data 1$`} {
		args := []string{path, "--force", "-n", "4"}
		if sets != "" {
			args = append(args, "--set", sets)
		}
		code, out, errs := call(args...)
		planned, text, more :=
			call(append([]string{"plan"}, slices.DeleteFunc(args, func(a string) bool { return a == "--force" })...)...)
		ran, foreseen := line.FindStringSubmatch(errs), line.FindStringSubmatch(text)
		if code != status.OK || planned != status.OK || ran == nil || foreseen == nil || ran[1] != foreseen[1] ||
			!regexp.MustCompile(want).MatchString(ran[1]) {
			t.Errorf("%s: the run has %q, the plan %q, want %s:\n%s%s\n%s%s", sets, ran, foreseen, want, out, errs,
				text, more)
		}
		idle := strings.Contains(errs, "ranks compute no attention, because the input has 2 heads; ")
		if idle != (sets == "parallel.ring=1") ||
			idle != strings.Contains(more, "ranks compute no attention, because the input has 2 heads; ") {
			t.Errorf("%s: ranks are idle: %v\n%s%s", sets, idle, errs, more)
		}
	}
}

// An operator job whose degrees leave ranks without a head warns of it, with what to set.
func TestOperatorsWarnOfIdleRanks(t *testing.T) {
	for _, c := range []struct{ kind, sets, want, fix string }{
		{"attention", "parallel.ulysses=4",
			"parallel.ulysses = 4: 2 of 4 ranks compute no attention, because the input has 2 heads; ",
			`set parallel.ulysses = [12] and parallel.ring = [24] \(1 replica\), which is|start 2 ranks`},
		{"gdn", "gdn.strategy=heads", "2 of 4 ranks compute no linear attention, because the input has 2 value heads; ",
			`set gdn.strategy = "state", which is expected to process`},
		{"gdn", "gdn.strategy=state", "", ""},
	} {
		path := operatorJob(t, c.kind)
		for _, verb := range []string{"run", "plan"} {
			code, out, errs := call(verb, path, "-n", "4", "--set", c.sets)
			if code != status.OK {
				t.Fatalf("%s %s: %v\n%s%s", verb, c.sets, code, out, errs)
			}
			_, fix, idle := strings.Cut(errs, c.want)
			if c.want == "" {
				idle = strings.Contains(errs, "ranks compute no")
			}
			if idle != (c.want != "") || idle && !regexp.MustCompile(c.fix).MatchString(fix) {
				t.Errorf("%s %s: want %q, %q in\n%s", verb, c.sets, c.want, c.fix, errs)
			}
		}
	}
}
