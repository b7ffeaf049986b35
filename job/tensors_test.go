package job

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// verify --tensors writes the same tokens, in order, on every mesh. Their losses follow from the
// logits, and their sum is the loss of the step.
func TestVerifyWritesTensors(t *testing.T) {
	job := filepath.Join(goldens, "llama-sgd-dp2", "job.toml")
	for _, m := range []struct{ ranks, ulysses, ring, batch, accumulate string }{{"1", "1", "1", "1", "4"},
		{"4", "2", "1", "1", "2"}, {"4", "2", "2", "1", "4"}, {"2", "2", "1", "2", "2"}} {
		path := filepath.Join(t.TempDir(), "tensors.safetensors")
		args := []string{"verify", job, "-n", m.ranks, "--set", "parallel.ulysses=" + m.ulysses, "--set",
			"parallel.ring=" + m.ring, "--set", "data.batch=" + m.batch, "--set",
			"data.accumulate=" + m.accumulate, "--set", "tile.loss=7", "--set",
			"output.dir=" + t.TempDir(), "--tensors", path}
		if code, out, errs := call(args...); code != status.OK {
			t.Fatalf("%v %v\n%s%s", m, code, out, errs)
		}
		if code, _, errs := call(args...); code != status.IO {
			t.Errorf("an existing file was overwritten: %v %s", code, errs)
		}
		checkTokens(t, path)
	}
}

// A file of --tensors that cannot be written is refused before the evaluation. The other ranks may
// not have its folder.
func TestTensorsFileIsCheckedFirst(t *testing.T) {
	dir := t.TempDir()
	o := Options{verb: "logits", tensors: filepath.Join(dir, "none", "x.safetensors")}
	if err := o.checkTensorsFile(0); status.Of(err) != status.IO ||
		!strings.Contains(err.Error(), "its folder cannot be written: ") {
		t.Error(err)
	}
	if err := o.checkTensorsFile(1); err != nil {
		t.Error(err)
	}
	o.tensors = filepath.Join(dir, "x.safetensors")
	if err := o.checkTensorsFile(0); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Error(left, err)
	}
}

func checkTokens(t *testing.T, path string) {
	f, err := tensor.OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	floats := func(name string) []float32 {
		e, ok := f.Entry(name)
		x := make([]float32, e.Numel())
		if err := f.ReadFloat32(e, 0, x); err != nil || !ok {
			t.Fatal(name, err)
		}
		return x
	}
	ids := func(name string) []int64 {
		e, ok := f.Entry(name)
		x := make([]int64, e.Numel())
		if err := f.ReadInt64(e, 0, x); err != nil || !ok {
			t.Fatal(name, err)
		}
		return x
	}
	sequence, index, targets, losses, logits := ids("sequence"), ids("index"), ids("targets"), floats("token loss"),
		floats("logits")
	if n := len(sequence); n != 4*64 || len(ids("input_ids")) != n || len(logits)%n != 0 {
		t.Fatalf("%d tokens, %d logits", n, len(logits))
	}
	for i := range targets {
		if sequence[i] != int64(i/64) || index[i] != int64(i%64) {
			t.Fatalf("token %d is token %d of sequence %d", i, index[i], sequence[i])
		}
	}
	near.Value(t, "loss", float64(floats("loss")[0]), meanOfTokens(t, targets, losses, logits), 1e-6)
}

// meanOfTokens checks that the losses of tokens follow from their logits, and returns their mean.
func meanOfTokens(t *testing.T, targets []int64, losses, logits []float32) float64 {
	t.Helper()
	vocabulary := len(logits) / len(targets)
	sum, valid := 0.0, 0.0
	for i, target := range targets {
		if target < 0 {
			continue
		}
		all := 0.0
		for _, x := range logits[i*vocabulary : (i+1)*vocabulary] {
			all += math.Exp(float64(x))
		}
		near.Value(t, "loss of a token", float64(losses[i]), math.Log(all)-float64(logits[i*vocabulary+int(target)]),
			2e-5)
		sum, valid = sum+float64(losses[i]), valid+1
	}
	return sum / valid
}
