package job

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// What verify found is JSON for programs, and nothing else on standard output.
func TestVerifyAsJSON(t *testing.T) {
	code, out, errs := call("verify", "../testdata/goldens/attention-gqa-packed/job.toml", "--json", "-n", "3", "--set", "device.backend=cpu",
		"--set", "attention.output="+filepath.Join(t.TempDir(), "out"))
	var r verdict
	if err := json.Unmarshal([]byte(out), &r); code != status.OK || err != nil {
		t.Fatalf("%v %v\n%s%s", code, err, out, errs)
	}
	if r.Ranks != 3 || r.Ulysses != 3 || r.Data != 1 || r.DType != "f32" || r.Kernels == "" || r.Limit != 2e-5 || !r.Same || len(r.Tensors) != 5 {
		t.Errorf("%+v", r)
	}
	for _, x := range r.Tensors {
		if x.Name == "" || len(x.Shape) == 0 || !x.Judged || !x.Within || x.Bits && x.Max != 0 || float64(x.Relative) > r.Limit {
			t.Errorf("%+v", x)
		}
	}
	if code, _, errs := call("plan", "x.toml", "--json"); code != status.InvalidArgument || !strings.Contains(errs, "--json is a flag of verify") {
		t.Errorf("%v %s", code, errs)
	}
}

// A number that is none is null, a tensor too far is so in both forms, and the sentence that all is well is missing.
func TestVerdictOfABadRun(t *testing.T) {
	r := verdict{Limit: 2e-5, Tensors: []compared{{Name: "out", Shape: []int64{2}, Max: quantity(math.Inf(1)), Mean: quantity(math.NaN()), Relative: 0.5, Judged: true}}}
	var text, table bytes.Buffer
	if err := r.print(&text, true); err != nil {
		t.Fatal(err)
	}
	var back map[string]any
	if err := json.Unmarshal(text.Bytes(), &back); err != nil || back["same"] != false {
		t.Fatal(err, text.String())
	}
	if x := back["tensors"].([]any)[0].(map[string]any); x["max"] != nil || x["mean"] != nil || x["relative"] != 0.5 || x["within"] != false || x["bits_equal"] != false {
		t.Error(x)
	}
	if err := r.print(&table, false); err != nil || !strings.Contains(table.String(), "TOO FAR") || strings.Contains(table.String(), "the same within") {
		t.Error(err, table.String())
	}
	if err := r.print(failing{}, true); err == nil {
		t.Error("nobody noticed")
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
