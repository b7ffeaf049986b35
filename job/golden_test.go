package job

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ulysses/tensor"
	"ulysses/testkit/near"
)

// goldens is the folder with PyTorch's results. Only testdata/goldens/make.py writes it.
const goldens = "../testdata/goldens"

type goldenCase struct {
	Kind         string
	Name         string
	Job          string
	Ranks        int
	Steps        int64
	Losses       []float64
	GradNorms    []float64 `json:"grad_norms"`
	LR           []float64
	Tokens       []int64
	TargetTokens []int64                                        `json:"target_tokens"`
	Model        string                                         // folder, from the case's
	Final        map[string]struct{ Norm, Sum, Change float64 } // change: norm of final - initial
	SHA256       map[string]string                              // of the inputs, by path
}

func readGoldens(t *testing.T, kind string) map[string]goldenCase {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(goldens, "*", "case.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no goldens under %s: %v: run make goldens", goldens, err)
	}
	cases := map[string]goldenCase{}
	for _, f := range files {
		var c goldenCase
		b, err := os.ReadFile(f)
		if err == nil {
			err = json.Unmarshal(b, &c)
		}
		if err != nil {
			t.Fatal(f, err)
		}
		if c.Kind == kind {
			cases[filepath.Dir(f)] = c
		}
	}
	if len(cases) == 0 {
		t.Fatalf("no goldens of kind %s", kind)
	}
	return cases
}

// namedGoldens returns the goldens of kind train with these names, by folder.
func namedGoldens(t *testing.T, names ...string) map[string]goldenCase {
	t.Helper()
	cases := readGoldens(t, "train")
	maps.DeleteFunc(cases, func(_ string, c goldenCase) bool { return !slices.Contains(names, c.Name) })
	if len(cases) != len(names) {
		t.Fatalf("%d goldens of %v", len(cases), names)
	}
	return cases
}

// checkInputs compares the inputs with the hashes of the files that the goldens were made from.
func checkInputs(t *testing.T, dir string, c goldenCase) {
	t.Helper()
	if len(c.SHA256) == 0 {
		t.Fatal("the golden records no input hashes")
	}
	for path, want := range c.SHA256 {
		b, err := os.ReadFile(filepath.Join(goldens, path))
		if err != nil {
			t.Fatal(err)
		}
		if got := sha256.Sum256(b); hex.EncodeToString(got[:]) != want {
			t.Fatalf("%s is not the file this golden was made from", path)
		}
	}
}

// Five steps on the golden's ranks have PyTorch's losses, gradient norms and final weights.
func TestGoldenTraining(t *testing.T) {
	for dir, c := range readGoldens(t, "train") {
		t.Run(c.Name, func(t *testing.T) {
			checkInputs(t, dir, c)
			trainGolden(t, dir, c, c.Ranks)
		})
	}
}

// trainGolden runs a golden's job on a number of ranks, compares it with the golden, and returns
// its output.
func trainGolden(t *testing.T, dir string, c goldenCase, ranks int, sets ...string) string {
	t.Helper()
	out := t.TempDir()
	var stdout, stderr bytes.Buffer
	err := Run(Options{Path: filepath.Join(dir, c.Job), Sets: append(sets, "output.dir="+out), Ranks: ranks,
		Verbose: true, Stdout: &stdout, Stderr: &stderr})
	if err != nil {
		t.Fatal(err, stderr.String())
	}
	for i, r := range readSteps(t, out, c.Steps) {
		near.Value(t, fmt.Sprintf("loss of step %d", i+1), r.Loss, c.Losses[i], 2e-4)
		near.Value(t, fmt.Sprintf("gradient norm of step %d", i+1), r.GradNorm, c.GradNorms[i], 2e-3*c.GradNorms[i])
		near.Value(t, fmt.Sprintf("learning rate of step %d", i+1), r.LR, c.LR[i], 1e-12)
		if r.Tokens != c.Tokens[i] || r.TargetTokens != c.TargetTokens[i] || r.Step != int64(i+1) {
			t.Errorf("step %d: %+v, want tokens %d, targets %d", i+1, r, c.Tokens[i], c.TargetTokens[i])
		}
	}
	checkWeights(t, filepath.Join(out, "model", "model.safetensors"), filepath.Join(dir, c.Model), c)
	return stdout.String()
}

type metricsLine struct {
	Step         int64
	Loss         float64
	EvalLoss     *float64 `json:"eval_loss"`
	GradNorm     float64  `json:"grad_norm"`
	AuxLoss      *float64 `json:"aux_loss"`
	ExpertLoad   *float64 `json:"expert_load"`
	LR           float64
	Tokens       int64
	TargetTokens int64 `json:"target_tokens"`
	Seconds      float64
	ModelTFLOPS  float64 `json:"model_tflops"`
}

func readMetrics(t *testing.T, path string) []metricsLine {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var lines []metricsLine
	for s := bufio.NewScanner(f); s.Scan(); {
		var r metricsLine
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			t.Fatalf("%s: %v", s.Text(), err)
		}
		lines = append(lines, r)
	}
	return lines
}

// readSteps is readMetrics for the output folder of a run of so many steps.
func readSteps(t *testing.T, out string, steps int64) []metricsLine {
	t.Helper()
	lines := readMetrics(t, filepath.Join(out, "metrics.jsonl"))
	if int64(len(lines)) != steps {
		t.Fatalf("%d records, want %d", len(lines), steps)
	}
	return lines
}

// checkWeights compares the norm and the sum of every trained tensor, and its distance from the
// initial values.
func checkWeights(t *testing.T, path, initial string, c goldenCase) {
	t.Helper()
	final, rounding := readWeights(t, path)
	start := map[string][]float32{}
	shards, _ := filepath.Glob(filepath.Join(initial, "*.safetensors"))
	for _, s := range shards {
		shard, _ := readWeights(t, s)
		maps.Copy(start, shard)
	}
	if len(final) != len(c.Final) {
		t.Errorf("%d tensors saved, PyTorch has %d", len(final), len(c.Final))
	}
	for name, want := range c.Final {
		x, x0 := final[name], start[name]
		if x == nil || len(x) != len(x0) {
			t.Errorf("%s was not saved, or in another shape", name)
			continue
		}
		sum, size, squares, moved := 0.0, 0.0, 0.0, 0.0
		for i, v := range x {
			sum += float64(v)
			size += math.Abs(float64(v))
			squares += float64(v) * float64(v)
			moved += math.Pow(float64(v)-float64(x0[i]), 2)
		}
		norm, change := math.Sqrt(squares), math.Sqrt(moved)
		if !(math.Abs(norm-want.Norm) <= (2e-4+rounding)*want.Norm) ||
			!(math.Abs(sum-want.Sum) <= 2e-3*max(want.Norm, 1)+rounding*size) ||
			!(math.Abs(change-want.Change) <= 5e-3*want.Change+1e-7+rounding*want.Norm) {
			t.Errorf("%s: norm %.7f sum %.7f change %.7f, PyTorch %.7f, %.7f, %.7f", name, norm, sum, change, want.Norm,
				want.Sum, want.Change)
		}
	}
}

// readWeights also returns the relative rounding error of the storage type, which is the source's.
func readWeights(t *testing.T, path string) (all map[string][]float32, rounding float64) {
	t.Helper()
	s, err := tensor.OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	all = map[string][]float32{}
	for _, e := range s.Entries() {
		x := make([]float32, e.Numel())
		if err := s.ReadFloat32(e, 0, x); err != nil {
			t.Fatal(err)
		}
		all[e.Name] = x
		if e.DType == tensor.BF16 {
			rounding = 1.0 / 256
		}
	}
	return all, rounding
}
