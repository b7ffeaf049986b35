package job

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// evaluatedWith runs the verb eval and returns the line that it adds to metrics.jsonl.
func evaluatedWith(t *testing.T, dir, folder string, ranks int, sets ...string) evalLine {
	t.Helper()
	args := []string{"eval", filepath.Join(dir, "job.toml"), "-n", fmt.Sprint(ranks)}
	if folder != "" {
		args = append(args, folder)
	}
	for _, s := range sets {
		args = append(args, "--set", s)
	}
	code, out, errs := call(args...)
	if code != status.OK || strings.Contains(errs, "no effect") {
		t.Fatalf("%v: %v\n%s%s", args, code, out, errs)
	}
	all := readEvals(t, dir)
	last := all[len(all)-1]
	if last.Step != 0 {
		t.Fatalf("%v: the last line is %+v", args, last)
	}
	return last
}

// The verb eval gives, for each checkpoint of a run, the losses that the run had after its step, on
// every mesh and ZeRO stage. The model folder has the losses of the last one. Frozen parameters and
// adapters come from where the run had them.
func TestEvalCheckpoint(t *testing.T) {
	train := func(t *testing.T, dir string, run func(int, ...string) (string, error), sets []string) {
		t.Helper()
		if _, err := run(2, sets...); err != nil {
			t.Fatal(err)
		}
		all := readEvals(t, dir)
		checkpoints := filepath.Join(dir, "out", "checkpoints")
		for _, x := range all {
			path := filepath.Join(checkpoints, fmt.Sprintf("step-%08d", x.Step))
			for _, mesh := range [][]string{{"1"}, {"2", "parallel.ulysses=2"},
				{"4", "parallel.ulysses=2", "parallel.zero=3"}} {
				var ranks int
				fmt.Sscan(mesh[0], &ranks)
				got := evaluatedWith(t, dir, path, ranks, append(slices.Clone(sets), mesh[1:]...)...)
				if !(math.Abs(*got.Loss-*x.Loss) < 2e-6) || got.Tokens != x.Tokens ||
					got.Checkpoint != filepath.Base(path) {
					t.Errorf("%v, %s: %+v %v, in the run %+v %v", mesh, path, got, *got.Loss, x, *x.Loss)
				}
			}
		}
		last := all[len(all)-1]
		for _, folder := range []string{checkpoints, ""} {
			if got := evaluatedWith(t, dir, folder, 1, sets...); *got.Loss != *evaluatedWith(t, dir,
				filepath.Join(checkpoints, fmt.Sprintf("step-%08d", last.Step)), 1, sets...).Loss {
				t.Errorf("%q: %v", folder, *got.Loss)
			}
		}
	}
	t.Run("sets", func(t *testing.T) {
		dir, run := newTracked(t, "")
		sets := []string{"train.steps=3", "checkpoint.every=1", "checkpoint.keep=9", "eval.every=1",
			"output.trace=[1, 2]"}
		train(t, dir, run, sets)
		want, got := evaluatedWith(t, dir, "", 2, sets...),
			evaluatedWith(t, dir, filepath.Join(dir, "out", "model"), 2, sets...)
		if *want.Loss != *got.Loss || want.A != got.A || want.B != got.B || want.A == want.B {
			t.Errorf("checkpoint %+v, model folder %+v", want, got)
		}
	})
	t.Run("freeze", func(t *testing.T) {
		dir, run := newKept(t)
		models, err := filepath.Abs("../testdata/goldens/models/qwen3")
		if err != nil {
			t.Fatal(err)
		}
		train(t, dir, run, []string{"model.new={}", "model.path=" + models, "data.tokenizer=bytes", "data.sequence=40",
			"checkpoint.every=1", "checkpoint.keep=9", "train.steps=2", "eval.split=0.3", "eval.every=1",
			`train.freeze=["*embed_tokens*", "*.mlp.*"]`})
	})
	t.Run("lora", func(t *testing.T) {
		dir, _, run := newLoRA(t, "qwen3")
		more := []string{"model.new={}", "data.tokenizer=bytes", "data.sequence=40", "checkpoint.every=1",
			"checkpoint.keep=9", "train.steps=3", "lora.rank=3", "lora.alpha=7",
			"model.path=" + filepath.Join(dir, "base"),
			"eval.split=0.3", "eval.every=1", "optimizer.lr=1e-2", "optimizer.schedule=constant"}
		train(t, dir, run, more)
		want, got := evaluatedWith(t, dir, "", 1, more...),
			evaluatedWith(t, dir, filepath.Join(dir, "out", "adapter"), 1, more...)
		if !(math.Abs(*want.Loss-*got.Loss) < 1e-6) {
			t.Errorf("checkpoint %v, adapters %v", *want.Loss, *got.Loss)
		}
		// the same job without [lora]
		other := slices.DeleteFunc(slices.Clone(more), func(set string) bool { return strings.HasPrefix(set, "lora.") })
		other = append(other, "lora.rank=0", "lora.alpha=0")
		if got := evaluatedWith(t, dir, filepath.Join(dir, "out", "adapter"), 1, other...); *got.Loss != *want.Loss {
			t.Errorf("checkpoint %v, adapters with a job without [lora] %v", *want.Loss, *got.Loss)
		}
		// whole models with a job that has [lora]: the merged one, and the base model
		merged := filepath.Join(dir, "merged")
		if code, _, errs := call("export", "--merge", filepath.Join(dir, "out", "adapter"), merged); code != status.OK {
			t.Fatal(errs)
		}
		if got := evaluatedWith(t, dir, merged, 1, more...); !(math.Abs(*want.Loss-*got.Loss) < 1e-5) {
			t.Errorf("checkpoint %v, merged %v", *want.Loss, *got.Loss)
		}
		if got := evaluatedWith(t, dir, filepath.Join(dir, "base"), 1, more...); !(*got.Loss > *want.Loss+1e-5) {
			t.Errorf("checkpoint %v, base model %v", *want.Loss, *got.Loss)
		}
	})
}

// Without other data, an evaluation is of each sequence of the training data once. The weights of
// data.source and the order of documents in training have no effect.
func TestEvalOfTrainingData(t *testing.T) {
	dir := t.TempDir()
	for name, letters := range map[string]string{"a": "ab", "b": "wxyz "} {
		lines := ""
		for i := range 12 {
			lines += fmt.Sprintf("{\"text\": %q}\n", strings.Repeat(letters, 4+i%5*7))
		}
		put(t, filepath.Join(dir, name+".jsonl"), lines)
	}
	job := filepath.Join(dir, "job.toml")
	loss := func(data string) evalLine {
		put(t, job, `kind = "eval"
[model.new]
model_type = "llama"
vocab_size = 256
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 2
[output]
dir = "out"
[data]
sequence = 64
`+data)
		if err := Run(Options{Path: job, Ranks: 2, Stdout: io.Discard, Stderr: io.Discard}); err != nil {
			t.Fatal(err)
		}
		all := readEvals(t, dir)
		return all[len(all)-1]
	}
	want := loss("path = [\"a.jsonl\", \"b.jsonl\"]\npack = false\n")
	got := loss("pack = false\n[[data.source]]\npath = \"a.jsonl\"\nweight = 9\n[[data.source]]\npath = \"b.jsonl\"\n")
	if got.Tokens != want.Tokens || !(math.Abs(*got.Loss-*want.Loss) < 1e-6) {
		t.Errorf("sources: loss %v of %d targets, want %v of %d", *got.Loss, got.Tokens, *want.Loss, want.Tokens)
	}
	want, got = loss("path = \"b.jsonl\"\n"), loss("path = \"b.jsonl\"\nshuffle_documents = true\n")
	if got.Tokens != want.Tokens || *got.Loss != *want.Loss {
		t.Errorf("shuffled: loss %v of %d targets, want %v of %d", *got.Loss, got.Tokens, *want.Loss, want.Tokens)
	}
}

// A checkpoint of another model, and a folder without weights, are refused on all ranks.
func TestEvalFaults(t *testing.T) {
	dir, run := newKept(t, "eval.split=0.3")
	job := filepath.Join(dir, "job.toml")
	for _, x := range []struct {
		args []string
		want string
	}{
		{[]string{job}, "eval: the job has no checkpoint in " + filepath.Join(dir, "out", "checkpoints")},
		{[]string{job, filepath.Join(dir, "none")}, "none: no such folder; name a checkpoint or a model folder"},
		{[]string{job, dir}, "has neither checkpoints (step-NNNNNNNN), nor config.json"},
	} {
		if code, _, errs := call(append([]string{"eval"}, x.args...)...); code != status.InvalidConfig ||
			!strings.Contains(errs, x.want) {
			t.Errorf("%v: %v %s", x.args, code, errs)
		}
	}
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	for set, want := range map[string]string{
		"model.new.rms_norm_eps=1e-3":   "of another model: rms_norm_eps of the model is 0.001, it was ",
		"model.new.num_hidden_layers=3": "it does not have model.layers.2", "lora.rank=2": "lora.rank"} {
		code, _, errs := call("eval", job, "-n", "2", "--set", "eval.split=0.3", "--set", set)
		if code != status.InvalidConfig || !strings.Contains(errs, want) {
			t.Errorf("%s: %v %s", set, code, errs)
		}
	}
	// the output.dir of the run stands for its folder of checkpoints
	if code, _, errs := call("eval", job, filepath.Join(dir, "out"), "--set", "eval.split=0.3"); code != status.OK ||
		!strings.Contains(errs, "step-00000006") {
		t.Errorf("%v: %s", code, errs)
	}
	if code, out, errs := call("eval", job, "--set", "eval.split=0.3"); code != status.OK ||
		strings.Contains(out, "after step") || !strings.Contains(out, " nats a token (") {
		t.Errorf("%v: %s%s", code, out, errs)
	}
	// damage: the checkpoint before it is evaluated, with a warning; a named one is refused
	newest := filepath.Join(dir, "out", "checkpoints", "step-00000006")
	if err := os.WriteFile(filepath.Join(newest, "rank-00001.safetensors"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, errs := call("eval", job, "-n", "2", "--set", "eval.split=0.3")
	if code != status.OK || !strings.Contains(errs, "skipped a damaged checkpoint") ||
		!strings.Contains(errs, "step-00000004") {
		t.Errorf("%v %s", code, errs)
	}
	if code, _, errs := call("eval", job, newest, "-n", "2", "--set", "eval.split=0.3"); code != status.InvalidConfig ||
		!strings.Contains(errs, "rank-00001.safetensors") {
		t.Errorf("%v %s", code, errs)
	}
}

// tokensIn returns the losses, the logits and the targets of a file of the verb logits.
func tokensIn(t *testing.T, path string) (losses, logits []float32, targets []int64) {
	t.Helper()
	f, err := tensor.OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for name, to := range map[string]*[]float32{"token loss": &losses, "logits": &logits} {
		e, _ := f.Entry(name)
		*to = make([]float32, e.Numel())
		if err := f.ReadFloat32(e, 0, *to); err != nil {
			t.Fatal(name, err)
		}
	}
	e, _ := f.Entry("targets")
	targets = make([]int64, e.Numel())
	if err := f.ReadInt64(e, 0, targets); err != nil {
		t.Fatal(err)
	}
	return losses, logits, targets
}

// logits writes the same tokens and losses on every mesh; their mean is the loss of the evaluation.
// A folder compares bitwise with itself, and the difference to other weights is that of the losses.
func TestLogits(t *testing.T) {
	dir, run := newTracked(t, "")
	sets := []string{"train.steps=3", "checkpoint.every=1", "checkpoint.keep=9", "eval.every=1"}
	if _, err := run(2, sets...); err != nil {
		t.Fatal(err)
	}
	all := readEvals(t, dir)
	checkpoints, model := filepath.Join(dir, "out", "checkpoints"), filepath.Join(dir, "out", "model")
	logits := func(args ...string) (string, []string) {
		t.Helper()
		args = append([]string{"logits", filepath.Join(dir, "job.toml")}, args...)
		for _, s := range sets {
			args = append(args, "--set", s)
		}
		code, out, errs := call(args...)
		if code != status.OK {
			t.Fatalf("%v: %v\n%s%s", args, code, out, errs)
		}
		return out, args
	}
	var first []float32
	for _, mesh := range [][]string{{"1", "1", "0"}, {"2", "2", "3"}, {"4", "2", "1"}, {"4", "1", "0"}} {
		path := filepath.Join(t.TempDir(), "tokens.safetensors")
		out, args := logits("-n", mesh[0], "--set", "parallel.ulysses="+mesh[1], "--set", "parallel.zero="+mesh[2],
			"--tensors", path, "--logits")
		if code, _, errs := call(args...); code != status.IO {
			t.Errorf("an existing file was overwritten: %v %s", code, errs)
		}
		if want := fmt.Sprintf("step-00000003: loss %.6f of %d targets", *all[2].Loss,
			all[2].Tokens); !strings.Contains(out, want) {
			t.Errorf("%v: %s, want %s", mesh, out, want)
		}
		losses, logits, targets := tokensIn(t, path)
		near.Value(t, "loss", meanOfTokens(t, targets, losses, logits), *all[2].Loss, 1e-6)
		if first == nil {
			first = losses
		}
		for i := range losses {
			if !(math.Abs(float64(losses[i]-first[i])) < 2e-5) {
				t.Fatalf("%v: token %d has the loss %v, on one rank %v", mesh, i, losses[i], first[i])
			}
		}
	}
	for _, ranks := range []string{"1", "2"} {
		if out, _ := logits(checkpoints, "--compare", model, "-n", ranks, "--logits"); !strings.Contains(out,
			"bitwise equal") || !strings.Contains(out, "logits           max |Δ| 0;") {
			t.Errorf("%s ranks: %s", ranks, out)
		}
	}
	path := filepath.Join(t.TempDir(), "both.safetensors")
	out, _ := logits(filepath.Join(checkpoints, "step-00000001"), "--compare", model, "-n", "2", "--json",
		"--tensors", path)
	var d struct {
		Loss, Targets float64
		Compared      struct {
			Loss, Mean, Max float64
			Bitwise         bool
			Sequence, Index int64
			Set             string
		}
	}
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f, err := tensor.OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	whole := func(name string) []int64 {
		e, _ := f.Entry(name)
		x := make([]int64, e.Numel())
		if err := f.ReadInt64(e, 0, x); err != nil {
			t.Fatal(name, err)
		}
		return x
	}
	floats := func(name string) []float32 {
		e, _ := f.Entry(name)
		x := make([]float32, e.Numel())
		if err := f.ReadFloat32(e, 0, x); err != nil {
			t.Fatal(name, err)
		}
		return x
	}
	losses, others, targets := floats("token loss"), floats("token loss of the other"), whole("targets")
	sum, worst, n := 0.0, 0.0, 0.0
	var at int
	for i, loss := range losses {
		if targets[i] < 0 {
			continue
		}
		n++
		delta := math.Abs(float64(loss) - float64(others[i]))
		if sum += delta; !(delta <= worst) {
			worst, at = delta, i
		}
	}
	c := d.Compared
	if !(math.Abs(d.Loss-*all[0].Loss) < 1e-6) || !(math.Abs(c.Loss-*all[2].Loss) < 1e-6) || c.Bitwise ||
		n != d.Targets || !(math.Abs(c.Mean-sum/n) < 1e-9) || !(math.Abs(c.Max-worst) < 1e-9) ||
		c.Sequence != whole("sequence")[at] || c.Index != whole("index")[at] ||
		c.Set != []string{"near", "far.x"}[whole("set")[at]] {
		t.Errorf("%s: losses %v and %v; mean %v, max %v at %d", out, *all[0].Loss, *all[2].Loss, sum/n, worst, at)
	}
	if code, _, errs := call("logits", filepath.Join(dir, "job.toml"), model, "--set",
		"data.sequence=1"); code != status.OK ||
		!strings.Contains(errs, "WRN logits: no token of the evaluation's files is a target") {
		t.Errorf("%v: %s", code, errs)
	}
	bad := filepath.Join(t.TempDir(), "other")
	if code, _, errs := call("logits", filepath.Join(dir, "job.toml"), "--compare",
		bad); code != status.InvalidConfig || !strings.Contains(errs, "logits: "+bad) {
		t.Errorf("%v: %s", code, errs)
	}
}

// Checkpoints are evaluated, and two folders compared, on devices whose memory the host cannot
// read: in F32 with the losses of the CPU, in BF16 close to them.
func TestEvalOnALateDevice(t *testing.T) {
	dir, run := newTracked(t, "")
	if _, err := run(2, "train.steps=2", "checkpoint.every=1", "eval.every=1"); err != nil {
		t.Fatal(err)
	}
	want := readEvals(t, dir)[1]
	job, folder := filepath.Join(dir, "job.toml"), filepath.Join(dir, "out", "checkpoints")
	for dtype, limit := range map[string]float64{"f32": 1e-6, "bf16": 2e-2} {
		for _, zero := range []string{"0", "3"} {
			verb := func(o Options) error { o.words = []string{job, folder}; return Eval(o) }
			if _, errs, err := runLate(t, verb, job, 4, dtype, "parallel.ulysses=2",
				"parallel.zero="+zero); err != nil {
				t.Fatal(err, errs)
			}
			all := readEvals(t, dir)
			if got := all[len(all)-1]; !(math.Abs(*got.Loss-*want.Loss) <= limit) {
				t.Errorf("%s, zero %s: %v, want %v", dtype, zero, *got.Loss, *want.Loss)
			}
			verb = func(o Options) error {
				o.words, o.compare, o.logits = []string{job, folder}, filepath.Join(dir, "out", "model"), true
				return Logits(o)
			}
			out, errs, err := runLate(t, verb, job, 4, dtype, "parallel.ulysses=2", "parallel.zero="+zero)
			if err != nil || !strings.Contains(out, "bitwise equal") {
				t.Errorf("%s, zero %s: %v %s\n%s", dtype, zero, err, out, errs)
			}
		}
	}
}
