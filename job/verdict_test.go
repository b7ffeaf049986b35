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

// With --json, verify prints its verdict as JSON and nothing else on standard output.
func TestVerifyAsJSON(t *testing.T) {
	code, out, errs := call("verify", "../testdata/goldens/attention-gqa-packed/job.toml", "--json", "-n", "3", "--set", "device.backend=cpu",
		"--set", "attention.output="+filepath.Join(t.TempDir(), "out"))
	var r verdict
	if err := json.Unmarshal([]byte(out), &r); code != status.OK || err != nil {
		t.Fatalf("%v %v\n%s%s", code, err, out, errs)
	}
	if r.Ranks != 3 || r.Ulysses != 3 || r.Data != 1 || r.DType != "f32" || r.Kernels == "" || r.Limit != 2e-5 || !r.Same || r.Verdict != "within tolerance" && r.Verdict != "bitwise" || len(r.Tensors) != 5 {
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

// NaN and Inf are null in JSON, and a tensor out of tolerance is marked in both forms.
func TestVerdictOfABadRun(t *testing.T) {
	r := verdict{Ranks: 2, Ulysses: 2, Data: 1, Limit: 2e-5, Tensors: []compared{
		{Name: "out", Shape: []int64{2}, Max: quantity(math.Inf(1)), Mean: quantity(math.NaN()), Relative: 0.5, Judged: true},
		{Name: "lse", Shape: []int64{2}, Bits: true, Judged: true, Within: true}}}
	var text, table bytes.Buffer
	if err := r.printJSON(&text); err != nil {
		t.Fatal(err)
	}
	var back map[string]any
	if err := json.Unmarshal(text.Bytes(), &back); err != nil || back["same"] != false || back["verdict"] != "FAIL" {
		t.Fatal(err, text.String())
	}
	if x := back["tensors"].([]any)[0].(map[string]any); x["max"] != nil || x["mean"] != nil || x["relative"] != 0.5 || x["within"] != false || x["bits_equal"] != false {
		t.Error(x)
	}
	err := r.print(&table, false)
	if s := table.String(); err != nil || !strings.HasPrefix(s, "FAIL: 1 of 2 tensors on 2 ranks (ulysses 2 x data 1) and on one differ by more than 2e-05 of the largest element, by up to 5.0e-01") ||
		strings.Count(s, "FAIL") != 2 || strings.Contains(s, "lse") {
		t.Error(err, s)
	}
	if err := r.printJSON(failing{}); err == nil {
		t.Error("a failed write was not reported")
	}
	if err := r.print(failing{}, false); err == nil {
		t.Error("a failed write was not reported")
	}
}

// The verdict on the judged tensors comes first. A run that passes prints single tensors only with
// --all.
func TestVerdictFirst(t *testing.T) {
	same := compared{Name: "out", Bits: true, Judged: true, Within: true}
	near := compared{Name: "dq", Relative: 3e-7, Judged: true, Within: true}
	shown := compared{Name: "weight updated", Relative: 0.3}
	for _, x := range []struct {
		tensors []compared
		want    string
	}{
		{[]compared{same}, "bitwise: 1 tensor bitwise equal on 1 rank"},
		{[]compared{same, same, shown}, "bitwise: 2 tensors bitwise equal on 1 rank"},
		{[]compared{same, near, shown}, "within tolerance: 2 tensors on 1 rank (ulysses 1 x data 1) and on one differ by at most 3.0e-07 of the largest element (limit 2e-05); 1 are bitwise equal"},
	} {
		r := verdict{Ranks: 1, Ulysses: 1, Data: 1, Limit: 2e-5, Tensors: x.tensors}
		var short, long bytes.Buffer
		if err := r.print(&short, false); err != nil || !strings.HasPrefix(short.String(), x.want) || strings.Count(short.String(), "\n") != 1 {
			t.Errorf("%v: %q, want %q", err, short.String(), x.want)
		}
		if err := r.print(&long, true); err != nil || !strings.HasPrefix(long.String(), x.want) || strings.Count(long.String(), "\n") != 3+len(x.tensors) {
			t.Errorf("%v: %s", err, long.String())
		}
	}
	dir, _ := newKept(t)
	for args, lines := range map[string]int{"": 1, "-q": 1, "--all": 30} {
		code, out, errs := call(append([]string{"verify", filepath.Join(dir, "job.toml"), "-n", "2"}, strings.Fields(args)...)...)
		if n := strings.Count(out, "\n"); code != status.OK || !strings.HasPrefix(out, "within tolerance: ") || n < lines || n > 1 && lines == 1 || strings.Contains(out, "differ\t") && lines == 1 {
			t.Errorf("%q: %v, %d lines\n%s%s", args, code, n, out, errs)
		}
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
