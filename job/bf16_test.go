package job

import (
	"bytes"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

// inBF16 has the --set arguments for BF16 on the CPU.
var inBF16 = []string{"device.backend=cpu", "device.dtype=bf16"}

// Training in BF16 on the CPU has the losses of F32 within the rounding of BF16, on any mesh.
// Master weights are F32, and the model folder has the type of the source.
func TestTrainingInBF16(t *testing.T) {
	for dir, c := range readGoldens(t, "train") {
		if !strings.Contains(c.Name, "dp2") && !strings.Contains(c.Name, "clip") &&
			!strings.Contains(c.Name, "packed") {
			continue // each model, both optimizers, and every kind of mesh are among these
		}
		t.Run(c.Name, func(t *testing.T) {
			run := func(ranks int, sets ...string) []metricsLine {
				var stdout, stderr bytes.Buffer
				here := t.TempDir()
				o := Options{Path: filepath.Join(dir, c.Job), Sets: append(sets, "output.dir="+here), Ranks: ranks,
					Verbose: true, Stdout: &stdout, Stderr: &stderr}
				if err := Run(o); err != nil {
					t.Fatal(err, stderr.String())
				}
				if half := len(sets) > 0; strings.Contains(stdout.String(), "master weights") != half ||
					strings.Contains(stderr.String(), "computing in bf16") != half {
					t.Errorf("%v: masters, or the type: %s%s", sets, stdout.String(), stderr.String())
				}
				if !strings.Contains(stdout.String(), ": equal") {
					t.Errorf("bytes sent: %s", stdout.String())
				}
				return readMetrics(t, filepath.Join(here, "metrics.jsonl"))
			}
			want := run(c.Ranks)
			runs := [][]metricsLine{run(c.Ranks, inBF16...)}
			if !strings.Contains(c.Name, "dp2") {
				runs = append(runs, run(1, append(inBF16, "parallel.ulysses=0")...))
			}
			for _, got := range runs {
				if len(got) != len(want) {
					t.Fatalf("%d records, want %d", len(got), len(want))
				}
				equal := true
				for i, r := range got {
					equal = equal && r.Loss == want[i].Loss
					if d := math.Abs(r.Loss - want[i].Loss); !(d <= 1e-2*math.Abs(want[i].Loss)) {
						t.Errorf("step %d: loss %.7f, in F32 %.7f", i+1, r.Loss, want[i].Loss)
					}
				}
				if equal {
					t.Error("nothing was rounded")
				}
			}
		})
	}
}

// An operator job in BF16 writes outputs and gradients in BF16, close to the results in float64.
// They are bitwise equal on any number of ranks if no ranks share a key head.
func TestSavedTensorsInBF16(t *testing.T) {
	dirs, err := filepath.Glob(filepath.Join(goldens, "attention-*"))
	if err != nil || len(dirs) < 3 {
		t.Fatal(dirs, err)
	}
	for _, dir := range dirs {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			var first []byte
			for _, ranks := range []int{1, 2, 3} {
				var stdout bytes.Buffer
				file := filepath.Join(t.TempDir(), "out.safetensors")
				o := Options{Path: filepath.Join(dir, "job.toml"), Sets: append(inBF16, "attention.output="+file),
					Ranks: ranks, Verbose: true, Stdout: &stdout, Stderr: io.Discard}
				if err := Run(o); err != nil || !strings.Contains(stdout.String(), ": equal") ||
					!strings.Contains(stdout.String(), "in bf16") {
					t.Fatal(ranks, err, stdout.String())
				}
				// of what does not depend on how query heads of a key head are dealt
				bits := checkHalves(t, file, dir)
				if first == nil {
					first = bits
				} else if !bytes.Equal(bits, first) {
					t.Errorf("%d ranks: not the bits of one", ranks)
				}
			}
		})
	}
}

// In BF16, verify also compares all ranks with one rank.
func TestVerifyInBF16(t *testing.T) {
	for dir, c := range namedGoldens(t, "qwen3-sgd-packed") {
		var stdout, stderr bytes.Buffer
		err := Verify(Options{Path: filepath.Join(dir, c.Job),
			Sets: append(inBF16, "output.dir="+t.TempDir(), "parallel.ulysses=2"), Ranks: 4, Verbose: true,
			Stdout: &stdout, Stderr: &stderr})
		if err != nil || !strings.Contains(stdout.String(), "(bf16,") ||
			!strings.HasPrefix(stdout.String(), "within tolerance: ") {
			t.Errorf("%v\n%s%s", err, stdout.String(), stderr.String())
		}
	}
}
