package job

import (
	"bytes"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
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
	line := regexp.MustCompile(`mesh: (ulysses \d+(?: x ring \d+)? x data \d+): 4 ranks, 4 a node, \d+ query heads?, 4 sequences a step`)
	var log bytes.Buffer
	o := Options{Path: path, Sets: append(strings.Fields(sets), "output.dir="+t.TempDir(), "output.model=false"), Ranks: 4, Stdout: io.Discard, Stderr: &log}
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
	if code != status.OK || ran == nil || planned == nil || ran[1] != planned[1] || !strings.Contains(out, "4 ranks, "+planned[1]+", zero") {
		t.Errorf("the run has %q, the plan %q:\n%s%s%s", ran, planned, log.String(), out, errs)
	}
}
