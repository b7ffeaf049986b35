package job

import (
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/plan"
	"ulysses/model"
)

// The plan of an operator job has each rank's memory and bytes sent. The cases have documents,
// cross attention, values wider than keys, states, both strategies, both types, and heads and
// tokens that the ranks do not divide.
func TestPlanOfSavedTensorsIsTheRun(t *testing.T) {
	for _, c := range []struct{ golden, sets string }{
		{"attention-cross", ""}, {"attention-dv", ""}, {"attention-gqa-packed", ""},
		{"attention-gqa-packed", "device.dtype=bf16"},
		{"gdn-plain", "gdn.strategy=heads"}, {"gdn-plain", "gdn.strategy=state"},
		{"gdn-packed", "gdn.strategy=state device.dtype=bf16"}, {"gdn-states", "gdn.strategy=heads"},
		{"gdn-states", ""},
	} {
		for _, ranks := range []int{1, 2, 3, 7} {
			kind, _, _ := strings.Cut(c.golden, "-")
			sets := append(strings.Fields(c.sets), kind+".output="+filepath.Join(t.TempDir(), "out"),
				"device.backend=cpu", "device.threads=1")
			var mu sync.Mutex
			err := onRanks(Options{Path: "../testdata/goldens/" + c.golden + "/job.toml", Sets: sets, Ranks: ranks,
				Stdout: io.Discard, Stderr: io.Discard}, func(e *Env) error {
				r, err := computeOperator(e)
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				x, err := plan.SubjectOf(e.Job)
				if err != nil {
					return err
				}
				rank := e.Mesh.World.Rank()
				f, err := plan.PredictRank(e.Job, anyMachine(e.Device, 2), x, rank, true)
				if err != nil {
					return err
				}
				defer f.Close()
				sent := int64(0)
				for _, bytes := range f.Sent {
					sent += bytes
				}
				if model.Bytes(f.Memory) != r.Bytes || sent != r.Sent || f.Node+f.Network != sent ||
					f.Operator.Plan != r.Plan {
					t.Errorf(
						"%s %s on %d: rank %d: planned %v, %d bytes sent (%d to its node, %d to others), %s; the run has %d, %d, %s",
						c.golden, c.sets, ranks, rank,
						f.Memory, sent, f.Node, f.Network, f.Operator.Plan, r.Bytes, r.Sent, r.Plan)
				}
				if heavy := plan.Heaviest(x.Lengths, x.Heads, int64(ranks), 1); f.Seconds <= 0 ||
					f.Memory[0].Bytes <= 0 || !slices.Contains(heavy, 0) {
					t.Errorf("%s on %d: rank %d: %v s, %v, of ranks %v", c.golden, ranks, rank, f.Seconds,
						f.Memory, heavy)
				}
				return nil
			})
			if err != nil {
				t.Errorf("%s %s on %d: %v", c.golden, c.sets, ranks, err)
			}
		}
	}
}

// The verb plan works without the folder of the output, and refuses the same jobs as the run. It
// executes nothing.
func TestPlanOfSavedTensorsThroughTheCommandLine(t *testing.T) {
	golden := func(name string) string { return filepath.Join("../testdata/goldens", name, "job.toml") }
	beside := func() string {
		files, err := filepath.Glob("../testdata/goldens/*/*")
		if err != nil || len(files) == 0 {
			t.Fatal(err)
		}
		return strings.Join(files, " ")
	}
	before := beside()
	for _, c := range []struct {
		args string
		code status.Code
		want []string
	}{
		{"plan " + golden("attention-gqa-packed") + " -n 3 --set attention.output=nowhere/out", status.OK,
			[]string{"3 ranks, 3 a node", "input ", "saved for the backward pass", "workspace", "a run",
				"sequence: all-to-all", "tokens/s, without reading and writing", "fits"}},
		{"plan " + golden("gdn-states") + " -n 2", status.OK,
			[]string{"2 ranks, 2 a node", "input ", "by state", "gdn", "a run", "fits"}},
		{"plan " + golden("gdn-states") + " --search", status.InvalidArgument, []string{"no mesh to search"}},
		{"plan " + golden("gdn-states") + " -n 4 --set parallel.ulysses=2", status.InvalidConfig,
			[]string{"set it to 0"}},
		{"plan " + golden("gdn-states") + " --set gdn.input=nowhere", status.IO, []string{"nowhere"}},
		{"plan " + golden("gdn-states") + " -n 4 --set parallel.ring=2", status.InvalidConfig,
			[]string{"parallel.ring = 2", "no ring"}},
		{"plan " + golden("attention-gqa-packed") +
			" -n 4 --set parallel.ring=2 --set attention.softcap=2.0 --set attention.output=nowhere/out", status.OK,
			[]string{"4 ranks", "ring 2", "fits"}},
	} {
		code, out, errs := call(strings.Fields(c.args)...)
		if code != c.code || (code == status.OK) != (errs == "") {
			t.Errorf("%s: code %v\n%s%s", c.args, code, out, errs)
		}
		for _, w := range c.want {
			if !strings.Contains(out+errs, w) {
				t.Errorf("%s: no %q in\n%s%s", c.args, w, out, errs)
			}
		}
	}
	if after := beside(); after != before {
		t.Errorf("a plan left something beside the job: %v, then %v", before, after)
	}
}
