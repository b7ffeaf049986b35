package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/status"
)

// kept is a small job of six steps that writes a checkpoint every second step.
const kept = `seed = 5
[model.new]
model_type = "qwen3"
vocab_size = 256
hidden_size = 24
intermediate_size = 40
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
tie_word_embeddings = true
[data]
path = "a.txt"
sequence = 48
global_batch = 4
[optimizer]
lr = 3e-3
warmup = 2
[train]
steps = 6
[checkpoint]
every = 2
[output]
dir = "out"
`

// newKept writes the job and its data into a new folder. It returns the folder and a function that
// runs the job.
func newKept(t *testing.T, sets ...string) (dir string, run func(ranks int, sets ...string) (string, error)) {
	t.Helper()
	dir = t.TempDir()
	put(t, filepath.Join(dir, "a.txt"), strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40))
	put(t, filepath.Join(dir, "job.toml"), kept)
	return dir, func(ranks int, more ...string) (string, error) {
		var stdout bytes.Buffer
		err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: append(slices.Clone(sets), more...),
			Ranks: ranks, Verbose: true, Stdout: &stdout, Stderr: io.Discard})
		return stdout.String(), err
	}
}

func losses(t *testing.T, dir string) (x []float64) {
	t.Helper()
	for i, r := range readMetrics(t, filepath.Join(dir, "out", "metrics.jsonl")) {
		if r.Step != int64(i+1) {
			t.Fatalf("line %d of metrics.jsonl is of step %d", i+1, r.Step)
		}
		x = append(x, r.Loss)
	}
	return x
}

// A checkpoint that is being written when the next step fails on all ranks is completed. The run
// resumes from it with a lower learning rate.
func TestCheckpointBeforeAFailure(t *testing.T) {
	dir, run := newKept(t, "checkpoint.every=1", "optimizer.clip=0.0")
	if _, err := run(2, "optimizer.lr=1e18", "optimizer.warmup=0"); status.Of(err) != status.Numeric {
		t.Fatal(err)
	}
	states, err := os.ReadDir(filepath.Join(dir, "out", "checkpoints"))
	if err != nil || len(states) != 1 || states[0].Name() != "step-00000001" || len(losses(t, dir)) != 1 {
		t.Errorf("%v %v, losses %v", states, err, losses(t, dir))
	}
}

func drop(t *testing.T, dir string, steps ...int) {
	t.Helper()
	for _, step := range steps {
		if err := os.RemoveAll(filepath.Join(dir, "out", "checkpoints", fmt.Sprintf("step-%08d", step))); err != nil {
			t.Fatal(err)
		}
	}
}

// A checkpoint of one mesh and ZeRO stage is resumed on others. On the same mesh the following
// steps are bitwise equal; on others the losses are equal within rounding. The lines of later steps
// are removed from metrics.jsonl.
func TestResume(t *testing.T) {
	dir, run := newKept(t, "parallel.ulysses=4", "parallel.zero=3", "checkpoint.keep=9")
	if _, err := run(4); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	model := filepath.Join(dir, "out", "model", "model.safetensors")
	weights, err := os.ReadFile(model)
	if err != nil || len(want) != 6 {
		t.Fatal(err, want)
	}
	for _, x := range []struct {
		ranks int
		sets  []string
		exact bool
	}{
		{4, nil, true},
		{4, []string{"parallel.ulysses=2", "parallel.zero=1"}, false},
		{3, []string{"parallel.ulysses=3", "parallel.zero=2"}, false},
		{1, []string{"parallel.ulysses=1", "parallel.zero=0"}, false},
		{2, []string{"parallel.ulysses=1", "parallel.zero=0"}, false},
		// from what replicated weights wrote
		{4, []string{"parallel.ulysses=4", "parallel.zero=3"}, false},
	} {
		drop(t, dir, 4, 6)
		if _, err := run(x.ranks, x.sets...); err != nil {
			t.Fatalf("%+v: %v", x, err)
		}
		got := losses(t, dir)
		for i := range want {
			if d := math.Abs(got[i] - want[i]); !(d <= 1e-5) || x.exact && d != 0 {
				t.Errorf("%+v: step %d has loss %.8f, at first %.8f", x, i+1, got[i], want[i])
			}
		}
		if again, _ := os.ReadFile(model); x.exact && !bytes.Equal(again, weights) {
			t.Errorf("%+v: the weights have other bits", x)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "out", "checkpoints", ".*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	if weights, err = os.ReadFile(model); err != nil {
		t.Fatal(err)
	}
	for what, before := range map[string]func() error{
		// as after a kill between the last checkpoint and the model
		"lost": func() error { return os.RemoveAll(filepath.Dir(model)) },
		// the same, when the folder has a model of another run or of fewer steps
		"old": func() error {
			old := time.Now().Add(-time.Hour)
			return errors.Join(os.WriteFile(model, []byte("old"), 0o666), os.Chtimes(filepath.Dir(model), old, old))
		},
		"there": func() error { return nil },
	} {
		if err := before(); err != nil {
			t.Fatal(err)
		}
		out, err := run(4)
		if err != nil || !strings.Contains(out, "nothing left to do") {
			t.Errorf("a job that is done, its model %s: %v, %s", what, err, out)
		}
		if again, err := os.ReadFile(model); err != nil || !bytes.Equal(again, weights) {
			t.Errorf("a job that is done, its model %s: %v, or the weights have other bits", what, err)
		}
	}
}

// A run that resumes from the last checkpoint of another folder, and has no step left, replaces the
// model of the run before, though it is newer than the checkpoint.
func TestResumeTheEndOfAnotherFolder(t *testing.T) {
	dir, run := newKept(t)
	model := func(name string) []byte {
		text, err := os.ReadFile(filepath.Join(dir, name, "model", "model.safetensors"))
		if err != nil {
			t.Error(err)
		}
		return text
	}
	for _, sets := range [][]string{{"seed=5"}, {"seed=7", "output.dir=" + filepath.Join(dir, "other")}} {
		if _, err := run(1, sets...); err != nil {
			t.Fatal(err)
		}
	}
	want := model("out")
	if bytes.Equal(want, model("other")) {
		t.Fatal("both runs have the same model")
	}
	out, err := run(1, "seed=5", "output.dir="+filepath.Join(dir, "other"), "output.overwrite=true",
		"checkpoint.resume="+filepath.Join(dir, "out", "checkpoints", "step-00000006"))
	if err != nil || !strings.Contains(out, "nothing left to do") || !bytes.Equal(model("other"), want) {
		t.Errorf("%v: the model of the run before is left: %s", err, out)
	}
}

// The newest checkpoints stay. checkpoint.resume = "off" starts a new run.
func TestKeep(t *testing.T) {
	dir, run := newKept(t, "output.overwrite=true")
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "out", "checkpoints", "*"))
	if len(left) != 2 || filepath.Base(left[0]) != "step-00000004" || filepath.Base(left[1]) != "step-00000006" {
		t.Errorf("two are to be kept: %v", left)
	}
	want := losses(t, dir)
	// A new run of two steps replaces the first run's checkpoints: it is the one that is resumed.
	if _, err := run(1, "checkpoint.resume=off", "train.steps=2"); err != nil {
		t.Fatal(err)
	}
	if fresh, _ := filepath.Glob(filepath.Join(dir, "out", "checkpoints", "*")); len(fresh) != 1 ||
		filepath.Base(fresh[0]) != "step-00000002" {
		t.Errorf("after two steps of a new run there are %v", fresh)
	}
	if _, err := run(1, "checkpoint.resume=off"); err != nil || !slices.Equal(losses(t, dir), want) {
		t.Errorf("a new run: %v, %v, want %v", err, losses(t, dir), want)
	}
	if _, err := run(1, "checkpoint.resume="+left[0]); err != nil || !slices.Equal(losses(t, dir), want) {
		t.Errorf("from %s: %v, %v, want %v", left[0], err, losses(t, dir), want)
	}
}

// checkpoint.resume names one checkpoint. The refusal of a folder of checkpoints names one in it.
func TestResumeFromFolder(t *testing.T) {
	dir, run := newKept(t)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	for _, folder := range []string{out, filepath.Join(out, "checkpoints")} {
		_, err := run(2, "checkpoint.resume="+folder)
		expectFault(t, err, status.IO,
			[]string{"name one of the checkpoints in it, such as " +
				filepath.Join(out, "checkpoints", "step-00000006")})
	}
}

// All ranks refuse a checkpoint that is damaged, of another program, newer or of another run. The
// error names the file and the reason, and the checkpoint does not change.
func TestResumeFaults(t *testing.T) {
	for _, x := range []struct {
		name  string
		spoil func(state string) error
		sets  []string
		code  status.Code
		want  []string
		whole bool // the checkpoint is undamaged but of another run or program
	}{
		{name: "a byte", spoil: func(state string) error {
			path := filepath.Join(state, "rank-00001.safetensors")
			data, err := os.ReadFile(path)
			if err == nil {
				data[len(data)-3] ^= 1
				err = os.WriteFile(path, data, 0o644)
			}
			return err
		}, code: status.InvalidConfig, want: []string{"rank-00001.safetensors is damaged", "checksum"}},
		{name: "cut short", spoil: func(state string) error {
			return os.Truncate(filepath.Join(state, "rank-00000.safetensors"), 100)
		},
			code: status.InvalidConfig, want: []string{"rank-00000.safetensors has 100 bytes"}},
		{name: "a file gone", spoil: func(state string) error {
			return os.Remove(filepath.Join(state, "rank-00001.safetensors"))
		},
			code: status.InvalidConfig, want: []string{"rank-00001.safetensors", "no such file"}},
		{name: "no manifest", spoil: func(state string) error {
			return os.Remove(filepath.Join(state, "manifest.json"))
		},
			code: status.IO, want: []string{"manifest.json"}},
		{name: "half a manifest", spoil: func(state string) error {
			return os.Truncate(filepath.Join(state, "manifest.json"), 200)
		},
			code: status.InvalidConfig, want: []string{"manifest.json is damaged"}},
		{name: "an empty folder", spoil: func(state string) error {
			return errors.Join(os.RemoveAll(state), os.Mkdir(state, 0o777))
		},
			code: status.IO, want: []string{"manifest.json"}},
		{name: "another step", spoil: edit("step", 9), code: status.InvalidConfig,
			want: []string{"manifest.json is damaged", "sha256"}},
		{name: "other updates", spoil: edit("updates", 0), code: status.InvalidConfig,
			want: []string{"manifest.json is damaged", "sha256"}},
		{name: "a pipe", spoil: func(state string) error {
			path := filepath.Join(state, "manifest.json")
			return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600))
		}, code: status.IO, want: []string{"manifest.json is a named pipe; a regular file is needed"}},
		{name: "another's name", spoil: func(state string) error {
			return errors.Join(os.RemoveAll(state),
				os.CopyFS(state, os.DirFS(filepath.Join(filepath.Dir(state), "step-00000004"))))
		}, code: status.InvalidConfig, want: []string{"its name says step 6, its manifest.json step 4"}},
		{name: "newer", spoil: edit("format", 3), code: status.Unsupported,
			want: []string{"format 3, this program reads up to 2"}, whole: true},
		{name: "foreign", spoil: edit("producer", "another"), code: status.InvalidConfig,
			want: []string{"not written by this program"}},
		{name: "another model", sets: []string{"model.new.intermediate_size=48"}, code: status.InvalidConfig,
			want: []string{"of another run", "intermediate_size of the model is 48, it was 40", "mlp",
				"[48 24], in it [40 24]; ", " other parameters with another shape"}, whole: true},
		{name: "another batch", sets: []string{"data.global_batch=8"}, code: status.InvalidConfig,
			want: []string{"global batch is 8, it was 4"}, whole: true},
		{name: "another seed", sets: []string{"seed=6"}, code: status.InvalidConfig,
			want: []string{"seed is 6, it was 5"}, whole: true},
		{name: "other data", sets: []string{"data.sequence=40"}, code: status.InvalidConfig,
			want: []string{
				"data.path is 52 sequences of up to 40, it was 44 sequences of up to 48; data.sequence is 40, it was 48;"},
			whole: true},
		{name: "other text of the same length", spoil: func(state string) error {
			path := filepath.Join(state, "..", "..", "..", "a.txt")
			text, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(path, bytes.Replace(text, []byte("cat"), []byte("cow"), 1), 0o644)
			}
			return err
		}, code: status.InvalidConfig, want: []string{"of another run", "data.path is checksum ", ", it was checksum "},
			whole: true},
		{name: "another optimizer", sets: []string{"optimizer.name=sgd"}, code: status.InvalidConfig,
			want: []string{"optimizer.name is sgd, it was adamw"}, whole: true},
		{name: "nowhere", sets: []string{"checkpoint.resume=nowhere"}, code: status.IO,
			want: []string{"--set checkpoint.resume=nowhere", "checkpoint.resume: there is no folder ",
				`nowhere; name a checkpoint, or set "auto"`}, whole: true},
	} {
		t.Run(x.name, func(t *testing.T) {
			dir, run := newKept(t)
			if _, err := run(2); err != nil {
				t.Fatal(err)
			}
			if x.spoil != nil {
				if err := x.spoil(filepath.Join(dir, "out", "checkpoints", "step-00000006")); err != nil {
					t.Fatal(err)
				}
			}
			sets := x.sets
			if !x.whole { // a named checkpoint is not replaced by another
				sets = append(sets, "checkpoint.resume="+filepath.Join(dir, "out", "checkpoints", "step-00000006"))
			}
			for _, ranks := range []int{1, 2} {
				_, err := run(ranks, sets...)
				expectFault(t, err, x.code, x.want)
			}
			if n := len(losses(t, dir)); n != 6 {
				t.Errorf("metrics.jsonl has %d lines left", n)
			}
			if x.whole {
				return
			}
			want := losses(t, dir)
			var log bytes.Buffer
			err := Run(Options{Path: filepath.Join(dir, "job.toml"), Ranks: 2, Stdout: io.Discard, Stderr: &log})
			if err != nil || !slices.Equal(losses(t, dir), want) {
				t.Fatalf("from the one before: %v, losses %v, want %v", err, losses(t, dir), want)
			}
			for _, w := range append(x.want, "skipped a damaged checkpoint", "step-00000006", "step=4") {
				if !strings.Contains(log.String(), w) {
					t.Errorf("the log does not say %q: %s", w, log.String())
				}
			}
			whole(t, "afterwards", filepath.Join(dir, "out", "checkpoints"), "step-00000004", "step-00000006")
		})
	}
}

// edit changes a field of a manifest.
func edit(key string, value any) func(state string) error {
	return func(state string) error {
		path := filepath.Join(state, "manifest.json")
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var m map[string]any
		if err := json.Unmarshal(text, &m); err != nil {
			return err
		}
		if m[key] = value; value == nil {
			delete(m, key)
		}
		if text, err = json.Marshal(m); err != nil {
			return err
		}
		return os.WriteFile(path, text, 0o644)
	}
}

// soak is the number of kills in TestKill; make soak sets fifty.
func soak() int {
	n := 5
	fmt.Sscan(os.Getenv("ULYSSES_TEST_KILLS"), &n)
	return n
}

// TestChild runs a job in a process that other tests kill, stop or limit.
func TestChild(t *testing.T) {
	path := os.Getenv("ULYSSES_TEST_CHILD")
	if path == "" {
		t.Skip("for other tests to run")
	}
	if limit := os.Getenv("ULYSSES_TEST_FILE_LIMIT"); limit != "" {
		signal.Ignore(syscall.SIGXFSZ)
		var bytes uint64
		fmt.Sscan(limit, &bytes)
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: bytes, Max: bytes}); err != nil {
			t.Fatal(err)
		}
	}
	if uid := os.Getenv("ULYSSES_TEST_UID"); uid != "" {
		n := 0
		fmt.Sscan(uid, &n)
		if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(n), syscall.Setuid(n)); err != nil {
			t.Fatal(err)
		}
	}
	err := Run(Options{Path: path, Sets: strings.Fields(os.Getenv("ULYSSES_TEST_SETS")), Ranks: 2, Stdout: io.Discard,
		Stderr: os.Stderr})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(int(status.Of(err)))
}

func child(dir string, env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), append(env, "ULYSSES_TEST_CHILD="+filepath.Join(dir, "job.toml"))...)
	return cmd
}

// A job that is killed at any time, any number of times, resumes with the losses of an
// uninterrupted run.
func TestKill(t *testing.T) {
	dir, run := newKept(t)
	sets := "train.steps=40 checkpoint.every=1"
	begin := time.Now()
	if _, err := run(2, strings.Fields(sets)...); err != nil {
		t.Fatal(err)
	}
	whole := time.Since(begin)
	want := losses(t, dir)
	if err := os.RemoveAll(filepath.Join(dir, "out")); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	killed, finished := 0, 0
	for killed < soak() {
		cmd := child(dir, "ULYSSES_TEST_SETS="+sets)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(time.Duration(r.Float64()*float64(whole)), func() { cmd.Process.Kill() })
		err := cmd.Wait()
		timer.Stop()
		switch code := cmd.ProcessState.ExitCode(); {
		case code == -1:
			killed++
		case err == nil:
			finished++
			if got := losses(t, dir); !slices.Equal(got, want) {
				t.Fatalf("after %d kills: %v, want %v", killed, got, want)
			}
			if err := os.RemoveAll(filepath.Join(dir, "out")); err != nil {
				t.Fatal(err)
			}
		default:
			t.Fatalf("after %d kills: exit %d: %s", killed, code, stderr.String())
		}
	}
	if out, err := child(dir, "ULYSSES_TEST_SETS="+sets).CombinedOutput(); err != nil ||
		!slices.Equal(losses(t, dir), want) {
		t.Errorf("after %d kills: %v, %s: %v, want %v", killed, err, out, losses(t, dir), want)
	}
	t.Logf("%d kills, %d runs came to their end between", killed, finished)
}

// At SIGUSR1, and before the time limit, a run ends with a checkpoint and the exit code for a
// requeue. Then it resumes.
func TestStop(t *testing.T) {
	dir, run := newKept(t)
	sets := "train.steps=60 checkpoint.every=0"
	if _, err := run(2, strings.Fields(sets)...); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	for _, x := range []struct{ name, sets string }{{"signal", sets}, {"limit", sets + " train.time_limit=50ms"}} {
		if err := os.RemoveAll(filepath.Join(dir, "out")); err != nil {
			t.Fatal(err)
		}
		cmd := child(dir, "ULYSSES_TEST_SETS="+x.sets)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if x.name == "signal" {
			for range 2000 {
				if data,
					_ := os.ReadFile(filepath.Join(dir, "out", "metrics.jsonl")); bytes.Count(data, []byte("\n")) > 1 {
					break
				}
				time.Sleep(time.Millisecond)
			}
			if err := cmd.Process.Signal(syscall.SIGUSR1); err != nil {
				t.Fatal(err)
			}
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != int(status.Preempted) {
			t.Fatalf("%s: exit %d", x.name, code)
		}
		n := len(losses(t, dir))
		if page, err := os.ReadFile(filepath.Join(dir, "out", "report.html")); err != nil ||
			!bytes.Contains(page, fmt.Appendf(nil, "stopped early after step %d of", n)) {
			t.Errorf("%s: the report does not have the number of steps: %v", x.name, err)
		}
		if n == 0 || n == len(want) {
			t.Errorf("%s: stopped after %d steps", x.name, n)
		}
		if _, err := run(2, strings.Fields(sets)...); err != nil || !slices.Equal(losses(t, dir), want) {
			t.Errorf("%s: %v, %v, want %v", x.name, err, losses(t, dir), want)
		}
	}
}

// A Slurm job that is requeued does not replace the checkpoints of its earlier start, as it would
// with the settings for a new start.
func TestRequeuedAfresh(t *testing.T) {
	dir, run := newKept(t)
	const sets = "train.steps=60 checkpoint.every=0 checkpoint.resume=off output.overwrite=true"
	if _, err := run(2, strings.Fields(sets)...); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	start := func(restarts, sets string) (int, string) {
		var stderr bytes.Buffer
		cmd := child(dir, "ULYSSES_TEST_SETS="+sets, "SLURM_JOB_ID=7", "SLURM_RESTART_COUNT="+restarts)
		cmd.Stderr = &stderr
		if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode(), stderr.String()
	}
	if code, text := start("0", sets+" train.time_limit=50ms"); code != int(status.Preempted) {
		t.Fatalf("exit %d: %s", code, text)
	}
	done := losses(t, dir)
	code, text := start("1", sets)
	if code != int(status.InvalidConfig) || !strings.Contains(text, "checkpoint.resume: \"off\": Slurm has requeued the job") {
		t.Errorf("exit %d: %s", code, text)
	}
	if got := losses(t, dir); !slices.Equal(got, done) {
		t.Errorf("%d losses after a refused start, want %d", len(got), len(done))
	}
	if code, text := start("1", sets+" checkpoint.resume=auto"); code != 0 || !slices.Equal(losses(t, dir), want) {
		t.Errorf("exit %d: %s", code, text)
	}
	if code, text := start("0", sets); code != 0 { // another job with the settings for a new start
		t.Errorf("exit %d: %s", code, text)
	}
}

// A checkpoint that replaces a damaged one is kept as any other.
func TestCheckpointInPlaceOfADamagedOne(t *testing.T) {
	dir, run := newKept(t, "optimizer.schedule=constant")
	if _, err := run(2, "train.steps=4"); err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(dir, "out", "checkpoints", "step-00000004", "rank-00001.safetensors")
	if err := os.Truncate(damaged, 100); err != nil {
		t.Fatal(err)
	}
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	if got := stepsOn(t, dir); !slices.Equal(got, []int64{4, 6}) {
		t.Errorf("checkpoints of steps %v, want the newest two: 4 and 6", got)
	}
}

// A run that replaces another one does not keep checkpoints of it, from which it could resume if
// its own are damaged.
func TestCheckpointsOfAReplacedRun(t *testing.T) {
	dir, run := newKept(t, "optimizer.schedule=constant")
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	if _, err := run(2, "train.steps=5", "checkpoint.every=5", "checkpoint.resume=off",
		"output.overwrite=true"); err != nil {
		t.Fatal(err)
	}
	if got := stepsOn(t, dir); !slices.Equal(got, []int64{5}) {
		t.Errorf("checkpoints of steps %v, want that of the new run: 5", got)
	}
	// a run that resumes from a named checkpoint of the folder keeps those that lead to it
	if _, err := run(1, "train.steps=9", "checkpoint.every=1"); err != nil {
		t.Fatal(err)
	}
	from := filepath.Join(dir, "out", "checkpoints", "step-00000009")
	if _, err := run(1, "train.steps=10", "checkpoint.keep=3", "checkpoint.resume="+from); err != nil {
		t.Fatal(err)
	}
	if got := stepsOn(t, dir); !slices.Equal(got, []int64{8, 9, 10}) {
		t.Errorf("checkpoints of steps %v, want 8, 9 and 10", got)
	}
}
