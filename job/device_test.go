package job

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/fake"
	"ulysses/testkit/tensorfile"
)

// late opens test devices, whose memory the host cannot read and whose operations run late.
func late(compute ...tensor.DType) opener {
	return opener{
		device: func(c backends.Choice) (device.Device, string, error) {
			d, err := fake.Open(fake.Options{Seed: uint64(c.LocalRank), Compute: compute})
			return d, "asked for by a test", err
		},
		comm: func(d device.Device, host comm.Comm, policy string) (comm.Comm, string, error) {
			return fake.Communicator(d.(*fake.Device), host), "the only one", nil
		},
	}
}

// runLate runs a job file on test devices and returns its output.
func runLate(t *testing.T, verb func(Options) error, path string, ranks int, dtype string, sets ...string) (stdout,
	stderr string, err error) {
	t.Helper()
	var out, log bytes.Buffer
	sets = append([]string{"device.backend=auto", "device.dtype=" + dtype}, sets...)
	err = verb(Options{Path: path, Sets: sets, Ranks: ranks, Verbose: true, Stdout: &out, Stderr: &log, open: late()})
	return out.String(), log.String(), err
}

// Training on a test device has the losses of the CPU: bitwise equal in F32 if gradients are added
// in the same order, and close in BF16.
func TestTrainingJobsOnALateDevice(t *testing.T) {
	for dir, c := range readGoldens(t, "train") {
		if !strings.Contains(c.Name, "dp2") && !strings.Contains(c.Name, "clip") && !strings.Contains(c.Name, "text") {
			continue // each model, both optimizers, and every kind of mesh are among these
		}
		t.Run(c.Name, func(t *testing.T) {
			path, here := filepath.Join(dir, c.Job), t.TempDir()
			if err := Run(Options{Path: path, Sets: []string{"output.dir=" + here}, Ranks: c.Ranks, Stdout: io.Discard,
				Stderr: io.Discard}); err != nil {
				t.Fatal(err)
			}
			want := readMetrics(t, filepath.Join(here, "metrics.jsonl"))
			for dtype, limit := range map[string]float64{"f32": 0, "bf16": 1e-2, "auto": 1e-2} {
				out := t.TempDir()
				stdout, stderr, err := runLate(t, Run, path, c.Ranks, dtype, "output.dir="+out)
				if err != nil {
					t.Fatal(err, stderr)
				}
				got := readMetrics(t, filepath.Join(out, "metrics.jsonl"))
				if len(got) != len(want) {
					t.Fatalf("%s: %d records, want %d", dtype, len(got), len(want))
				}
				for i, r := range got {
					if d := math.Abs(r.Loss - want[i].Loss); !(d <= limit*math.Abs(want[i].Loss)) ||
						r.TargetTokens != want[i].TargetTokens {
						t.Errorf("%s, step %d: loss %.7f, on the CPU %.7f", dtype, i+1, r.Loss, want[i].Loss)
					}
				}
				if dtype == "f32" {
					checkWeights(t, filepath.Join(out, "model", "model.safetensors"), filepath.Join(dir, c.Model), c)
				}
				if dtype == "auto" {
					dtype = "bf16"
				}
				for _, w := range []string{"device: fake test device, kernels", "computing in " + dtype + ": asked for",
					"communicator: fake: the only one"} {
					if !strings.Contains(stderr, w) {
						t.Errorf("the log does not say %q: %s", w, stderr)
					}
				}
				if !strings.Contains(stdout, ": equal") ||
					strings.Contains(stdout, "master weights") != (dtype == "bf16") {
					t.Errorf("bytes sent, or masters: %s", stdout)
				}
			}
		})
	}
}

// An attention job on a test device writes the same file as on the CPU. In BF16, outputs and
// gradients have that type and are close.
func TestAttentionJobsOnALateDevice(t *testing.T) {
	dirs, err := filepath.Glob(filepath.Join(goldens, "attention-*"))
	if err != nil || len(dirs) < 3 {
		t.Fatal(dirs, err)
	}
	for _, dir := range dirs {
		for _, ranks := range []int{1, 2, 3} {
			t.Run(fmt.Sprint(filepath.Base(dir), ranks), func(t *testing.T) {
				path, out := filepath.Join(dir, "job.toml"), t.TempDir()
				cpu, full, half := filepath.Join(out, "cpu"), filepath.Join(out, "f32"), filepath.Join(out, "bf16")
				if err := Run(Options{Path: path, Sets: []string{"attention.output=" + cpu}, Ranks: ranks,
					Stdout: io.Discard,
					Stderr: io.Discard}); err != nil {
					t.Fatal(err)
				}
				for dtype, file := range map[string]string{"f32": full, "bf16": half} {
					stdout, _, err := runLate(t, Run, path, ranks, dtype, "attention.output="+file)
					if err != nil || !strings.Contains(stdout, ": equal") || !strings.Contains(stdout, "in "+dtype) {
						t.Fatal(dtype, err, stdout)
					}
				}
				a, err := os.ReadFile(cpu)
				if err != nil {
					t.Fatal(err)
				}
				if b, err := os.ReadFile(full); err != nil || !bytes.Equal(a, b) {
					t.Errorf("the file in F32 is not the CPU's (%v)", err)
				}
				checkHalves(t, half, dir)
			})
		}
	}
}

// checkHalves compares the results of a job in BF16 with a golden, and returns the bits of all but
// dk and dv.
func checkHalves(t *testing.T, file, dir string) (bits []byte) {
	t.Helper()
	f, err := tensor.OpenSafetensors(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, e := range f.Entries() {
		want := tensor.BF16
		if e.Name == "lse" {
			want = tensor.F32
		}
		got, _ := tensorfile.Read(t, file, e.Name)
		exact, _ := tensorfile.Read(t, filepath.Join(dir, "expected.safetensors"), e.Name)
		if e.DType != want || !(tensorfile.Relative(got, exact) < 2e-2) {
			t.Errorf("%s: %v, off by %.3g", e.Name, e.DType, tensorfile.Relative(got, exact))
		}
		if e.Name != "dk" && e.Name != "dv" {
			bits = fmt.Append(bits, e.Name, got)
		}
	}
	return bits
}

// Verify compares all ranks with one rank on the test device.
func TestVerifyOnALateDevice(t *testing.T) {
	for dir, c := range namedGoldens(t, "qwen3-sgd-packed", "llama-adamw-dp2") {
		for _, dtype := range []string{"f32", "bf16"} {
			stdout, stderr, err := runLate(t, Verify, filepath.Join(dir, c.Job), 4, dtype, "output.dir="+t.TempDir(),
				"parallel.ulysses=2")
			if err != nil || !strings.Contains(stdout, "("+dtype+",") ||
				!strings.HasPrefix(stdout, "within tolerance: ") {
				t.Errorf("%s in %s: %v\n%s%s", c.Name, dtype, err, stdout, stderr)
			}
		}
	}
	dir := filepath.Join(goldens, "attention-gqa-packed")
	for _, dtype := range []string{"f32", "bf16"} {
		stdout, stderr, err := runLate(t, Verify, filepath.Join(dir, "job.toml"), 3, dtype,
			"attention.output="+filepath.Join(t.TempDir(), "x"))
		if err != nil {
			t.Errorf("%s: %v\n%s%s", dtype, err, stdout, stderr)
		}
	}
}

// An input with NaN is refused, with the index of the element, on every device.
func TestLateAttentionRefusesNaN(t *testing.T) {
	x, y := make([]float32, 6*2*4), make([]float32, 6*2*4)
	x[(5*2+1)*4+3] = float32(math.NaN())
	path := filepath.Join(t.TempDir(), "in.safetensors")
	if err := tensor.WriteSafetensors(path, nil, []tensor.Item{{Name: "q", Tensor: tensor.OfFloat32(y, 6, 2, 4)},
		{Name: "k", Tensor: tensor.OfFloat32(x, 6, 2, 4)},
		{Name: "v", Tensor: tensor.OfFloat32(y, 6, 2, 4)}}); err != nil {
		t.Fatal(err)
	}
	job := filepath.Join(t.TempDir(), "job.toml")
	put(t, job, fmt.Sprintf("kind = \"attention\"\n[attention]\ninput = %q\noutput = %q\n", path, path+".out"))
	_, _, err := runLate(t, Run, job, 3, "bf16")
	expectFault(t, err, status.Numeric, []string{"k[5, 1, 3] is NaN"})
}

// All ranks refuse a compute type that the device does not have before the run. The error names the
// key.
func TestTypesOfTheDevice(t *testing.T) {
	dir := filepath.Join(goldens, "attention-gqa-packed")
	sets := []string{"attention.output=" + filepath.Join(t.TempDir(), "x"), "device.backend=auto", "device.dtype=bf16"}
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: sets, Ranks: 2, Stdout: io.Discard,
		Stderr: io.Discard, open: late(tensor.F32)})
	expectFault(t, err, status.Unsupported,
		[]string{"--set device.dtype=bf16", "fake computes in f32", `set it to "auto"`})
	for dtype, want := range map[string]tensor.DType{"auto": tensor.BF16, "f32": tensor.F32, "bf16": tensor.BF16} {
		j := file.Default()
		j.Device.DType = dtype
		if got, err := j.ComputeType(device.Info{Compute: []tensor.DType{tensor.BF16, tensor.F32}}); err != nil ||
			got != want {
			t.Errorf("%s: %v, %v", dtype, got, err)
		}
	}
	if names := file.DTypeNames([]tensor.DType{tensor.BF16, tensor.F32}); names != "bf16 and f32" {
		t.Error(names)
	}
}

// Jobs on the CUDA plug-in with device.backend = "cuda", as users start them, with the operations
// of the plug-in and its communicators.
func TestJobsOnThePlugin(t *testing.T) {
	cudatest.Use(t)
	for dir, c := range namedGoldens(t, "llama-adamw-dp2", "qwen3-adamw-packed") {
		for _, x := range []struct {
			dtype, comm string
			limit       float64
		}{{"f32", "auto", 2e-4}, {"bf16", "ipc", 1e-2}, {"auto", "local", 1e-2}} {
			out := t.TempDir()
			var stdout, stderr bytes.Buffer
			err := Run(Options{Path: filepath.Join(dir, c.Job), Ranks: c.Ranks, Verbose: true, Stdout: &stdout,
				Stderr: &stderr,
				Sets: []string{"device.backend=cuda", "device.dtype=" + x.dtype, "device.comm=" + x.comm,
					"train.steps=3", "output.dir=" + out}})
			if err != nil {
				t.Fatal(c.Name, x, err, stderr.String())
			}
			for i, r := range readSteps(t, out, 3) {
				// the schedule of 3 steps is another after two
				if d := math.Abs(r.Loss - c.Losses[i]); i < 2 && !(d <= x.limit*c.Losses[i]) {
					t.Errorf("%s, %v, step %d: loss %.7f, PyTorch %.7f", c.Name, x, i+1, r.Loss, c.Losses[i])
				}
			}
			if !strings.Contains(stdout.String(), ": equal") || !strings.Contains(stdout.String(), "of the device") ||
				!strings.Contains(stderr.String(), "device: cuda") {
				t.Errorf("%s, %v: %s%s", c.Name, x, stdout.String(), stderr.String())
			}
		}
	}
	dir := filepath.Join(goldens, "attention-gqa-packed")
	for _, x := range []struct {
		dtype string
		limit float64
	}{{"f32", 2e-5}, {"bf16", 2e-2}} {
		file := filepath.Join(t.TempDir(), "out")
		sets := []string{"device.backend=cuda", "device.dtype=" + x.dtype, "attention.output=" + file}
		if err := Run(Options{Path: filepath.Join(dir, "job.toml"), Ranks: 3, Sets: sets, Stdout: io.Discard,
			Stderr: io.Discard}); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"out", "lse", "dq", "dk", "dv"} {
			got, _ := tensorfile.Read(t, file, name)
			want, _ := tensorfile.Read(t, filepath.Join(dir, "expected.safetensors"), name)
			if e := tensorfile.Relative(got, want); !(e <= x.limit) {
				t.Errorf("%s in %s is off by %.3g", name, x.dtype, e)
			}
		}
		var stdout bytes.Buffer
		if err := Verify(Options{Path: filepath.Join(dir, "job.toml"), Ranks: 2, Sets: sets, Verbose: true,
			Stdout: &stdout, Stderr: io.Discard}); err != nil {
			t.Errorf("verify in %s: %v\n%s", x.dtype, err, stdout.String())
		}
	}
}
