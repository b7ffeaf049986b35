package job

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	vers "ulysses/internal/version"
)

func TestParseArgs(t *testing.T) {
	for _, c := range []struct {
		args string
		verb string
		want Options
		err  string
	}{
		{args: "job.toml", verb: "run", want: Options{Path: "job.toml"}},
		{args: "run job.toml --set a=1 -n 4 --set b=2=3", verb: "run",
			want: Options{Path: "job.toml", Sets: []string{"a=1", "b=2=3"}, Ranks: 4}},
		{args: "--ranks=2 --set a=1 verify --set=b=2 job.toml", verb: "verify",
			want: Options{Path: "job.toml", Sets: []string{"a=1", "b=2"}, Ranks: 2}},
		{args: "doctor", verb: "doctor"}, {args: "version", verb: "version"},
		{args: "", err: "no job file and no verb"}, {args: "run", err: "run: job file is missing"},
		{args: "verify", err: "verify: job file is missing"},
		{args: "job.toml verify", err: "the verb must come first"},
		{args: "a.toml b.toml", err: "there are 2 job files: a.toml, b.toml"},
		{args: "job.toml --ranks 0", err: "--ranks 0: not a number of ranks; set 1 to"},
		{args: "job.toml -n x", err: "invalid value"},
		{args: "job.toml --rank 2", err: "unknown flag --rank; did you mean --ranks?"},
		{args: "job.toml --set", err: "flag needs an argument"}, {args: "job.toml --set a", err: "not table.key=value"},
		{args: "job.toml --set =a", err: "table.key=value"},
		{args: "doctor x", err: "doctor has no arguments"},
		{args: "version -n 2", err: "version: this verb has no flags"},
	} {
		verb, o, err := parseArgs(strings.Fields(c.args))
		if c.err != "" {
			if status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), c.err) ||
				!strings.Contains(err.Error(), "--help") {
				t.Errorf("%q: %v", c.args, err)
			}
		} else if err != nil || verb != c.verb || o.Path != c.want.Path || o.Ranks != c.want.Ranks ||
			strings.Join(o.Sets, " ") != strings.Join(c.want.Sets, " ") {
			t.Errorf("%q: %s %+v %v", c.args, verb, o, err)
		}
	}
}

// call runs a command line and returns its exit code and output.
func call(args ...string) (code status.Code, stdout, stderr string) {
	var out, errs strings.Builder
	code = Main(args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestVerbs(t *testing.T) {
	for _, c := range []struct {
		args   []string
		code   status.Code
		out    string
		stderr string
	}{
		{[]string{"--help"}, status.OK, "usage: ulysses-mpi", ""},
		{[]string{"help"}, status.OK, "usage: ulysses-mpi", ""},
		{[]string{"verify", "-h"}, status.OK, "usage: ulysses-mpi", ""},
		{[]string{"version"}, status.OK, "ulysses-mpi " + vers.String, ""},
		{[]string{"export", "nowhere"}, status.InvalidArgument, "", "export: folder is missing"},
		{[]string{"export", "nowhere", "b", "c"}, status.InvalidArgument, "", "name a checkpoint and a folder"},
		{[]string{"export", "nowhere", "b", "-n", "2"}, status.InvalidArgument, "",
			"export: --ranks is a flag of run, plan, verify"},
		{[]string{"export", "nowhere", "b"}, status.IO, "", "checkpoint nowhere: "},
		{nil, status.InvalidArgument, "", "no job file and no verb"},
	} {
		code, out, errs := call(c.args...)
		if code != c.code || !strings.Contains(out, c.out) || !strings.Contains(errs, c.stderr) ||
			(c.stderr == "") != (errs == "") {
			t.Errorf("%v: code %v\nstdout %s\nstderr %s", c.args, code, out, errs)
		}
	}
}

// The faults of a job file are printed once, complete, on any number of ranks.
func TestFaultsThroughTheCommandLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "job.toml")
	if err := os.WriteFile(path, []byte("[data]\nsequnce = 1\n[modle]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, ranks := range []string{"1", "3"} {
		code, out, errs := call(path, "--ranks", ranks)
		want := "ulysses-mpi: 4 faults, invalid configuration:\n" +
			path + ":1: data.path: missing; name .txt, .jsonl, .parquet, .bin (with .idx) or .safetensors files\n" +
			path + ":1: model.path: missing; name a Hugging Face folder, or write the fields of a config.json in [model.new] for a model from scratch\n" +
			path + ":2: data.sequnce: unknown key; did you mean data.sequence?\n" +
			path + ":3: modle: unknown table; did you mean [model]?\n"
		if code != status.InvalidConfig || out != "" || errs != want {
			t.Errorf("%s ranks: %v\n%s%s", ranks, code, out, errs)
		}
	}
	code, _, errs := call(path+"x", "--ranks", "2")
	if code != status.IO || !strings.HasPrefix(errs, "ulysses-mpi: job file "+path+"x: ") ||
		strings.Count(errs, "\n") != 1 {
		t.Errorf("%v %s", code, errs)
	}
}

func TestWithoutRanks(t *testing.T) {
	for _, x := range []struct {
		code       status.Code
		text, want string
	}{
		{status.IO, "rank 0: rank 0: a: no such file", "a: no such file"},
		{status.IO, "rank 0: rank 0: b:3: x (4 of 4 ranks failed)", "b:3: x"},
		{status.IO, "rank 2: c: no such file", "rank 2: c: no such file"},
		{status.IO, "rank 0: rank 2: c (1 of 4 ranks failed)", "rank 2: c (1 of 4 ranks failed)"},
		{status.Comm, "rank 1: rank 1 on host failed: d", "rank 1 on host failed: d"},
		{status.IO, "rank 3: rank 3: e (2 of 2 ranks failed)", "e"},
		{status.IO, "rank 3 on n1: rank 3 on n1: e (2 of 2 ranks failed)", "e"},
		{status.IO, "rank 0: rank 3 on n1: e", "rank 3 on n1: e"},
		{status.Device, "rank 0: rank 0: no GPU", "rank 0: no GPU"},
		{status.Device, "rank 1 on n1: no GPU (2 of 2 ranks failed)", "rank 1 on n1: no GPU"},
		{status.Device, "no GPU", "no GPU"},
		{status.IO, "plain", "plain"},
	} {
		if got := withoutRanks(status.Errorf(x.code, "%s", x.text)); got != x.want {
			t.Errorf("%v %q: %q, want %q", x.code, x.text, got, x.want)
		}
	}
}

func TestDoctor(t *testing.T) {
	code, out, errs := call("doctor")
	if code != status.OK || errs != "" {
		t.Fatal(code, errs)
	}
	for _, want := range []string{"processor", "kernels", "cores", "memory", "MPI", "launcher", "CUDA plug-in",
		"missing:"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	t.Setenv("ULYSSES_ISA", "mmx")
	if code, out, _ = call("doctor"); code != status.OK || !strings.Contains(out, `"mmx"`) {
		t.Errorf("a pinned set that does not exist: %v\n%s", code, out)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk full") }

type exploding struct{}

func (exploding) Write([]byte) (int, error) { panic("boom") }

// An error of printing a table does not end the run on rank 0 while other ranks wait. The run
// returns it at its end.
func TestFullStandardOutput(t *testing.T) {
	t.Setenv("ULYSSES_TIMEOUT", "5s")
	dir, _ := newKept(t)
	code := Main([]string{filepath.Join(dir, "job.toml"), "--ranks", "2"}, full{}, io.Discard)
	if code != status.IO || len(losses(t, dir)) != 6 {
		t.Errorf("%v after %d of 6 steps", code, len(losses(t, dir)))
	}
}

// A fault of the data that a key names has the line of the job file, or the --set argument.
func TestLineOfDataFaults(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, "job.toml")
	put(t, job, strings.Replace(text(t, job), "a.txt", "none.txt", 1))
	line := 1 + strings.Count(text(t, job)[:strings.Index(text(t, job), "none.txt")], "\n")
	for _, c := range []struct{ set, want string }{
		{"seed=1", fmt.Sprintf("ulysses-mpi: %s:%d: data.path: %s: no such file", job, line,
			filepath.Join(dir, "none.txt"))},
		{"data.path=*.none", `ulysses-mpi: --set data.path=*.none: data.path: no file matches "*.none"`},
	} {
		if code, _, stderr := call(job, "-n", "2", "--set", c.set); code != status.IO ||
			!strings.Contains(stderr, c.want) {
			t.Errorf("%v: %s, want %s", code, stderr, c.want)
		}
	}
}

func TestTimeoutIsADuration(t *testing.T) {
	dir, run := newKept(t)
	for _, x := range []string{"90", "soon", "-1s"} {
		t.Setenv("ULYSSES_TIMEOUT", x)
		if _, err := run(1); status.Of(err) != status.InvalidArgument ||
			!strings.Contains(err.Error(), "ULYSSES_TIMEOUT="+x+": not a duration; set for example 90s") {
			t.Errorf("%s: %v", x, err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "out")); len(left) > 0 {
		t.Errorf("it ran: %v", left)
	}
}

func TestMainHoldsFailures(t *testing.T) {
	dir, _ := newKept(t)
	for _, args := range [][]string{{"doctor"}, {"plan", filepath.Join(dir, "job.toml")},
		{"plan", filepath.Join(dir, "job.toml"), "--search"}, {"version"}, {"completion", "bash"}} {
		if code := Main(args, full{}, io.Discard); code != status.IO {
			t.Errorf("%v on a full disk: %v", args, code)
		}
		if _, help, _ := call(args[0], "--help"); !strings.Contains(help, "\n   7  ") {
			t.Errorf("%s --help does not list 7\n%s", args[0], help)
		}
	}
	var errs strings.Builder
	if code := Main([]string{"version"}, exploding{}, &errs); code != status.Internal {
		t.Errorf("a panic: %v", code)
	}
	if s := errs.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "boom") ||
		!strings.Contains(s, "exploding") {
		t.Errorf("%q", s)
	}
}

// An error of one rank's command line or environment is printed with the rank's name. An error of
// all ranks is printed by rank 0.
func TestOwnFaultsOfARank(t *testing.T) {
	host := "node7"
	for name, value := range map[string]string{"SLURMD_NODENAME": host, "OMPI_COMM_WORLD_SIZE": "4",
		"OMPI_COMM_WORLD_LOCAL_SIZE": "4"} {
		t.Setenv(name, value)
	}
	for _, rank := range []string{"0", "2"} {
		t.Setenv("OMPI_COMM_WORLD_RANK", rank)
		if code, _, errs := call("job.toml", "--nope"); code != status.InvalidArgument || errs != "ulysses-mpi: rank "+
			rank+" on node7: unknown flag --nope; see ulysses-mpi --help\n" {
			t.Errorf("rank %s: %v: %s", rank, code, errs)
		}
	}
	var all strings.Builder
	(&Options{Stderr: &all}).complain(status.Errorf(status.InvalidConfig, "what ranks agreed on"))
	if all.Len() > 0 {
		t.Errorf("rank 2 says what rank 0 has said: %s", all.String())
	}
	if err := comm.RunLocal(2, func(c comm.Comm) error {
		if err := comm.Agree(c, status.Errorf(status.Device, "no GPU")); c.Rank() == 1 {
			(&Options{Stderr: &all}).complain(err)
		}
		return nil
	}); err != nil || all.Len() > 0 {
		t.Errorf("%v; rank 2 says which device all ranks miss: %s", err, all.String())
	}
	t.Setenv("OMPI_COMM_WORLD_RANK", "0")
	t.Setenv("OMPI_COMM_WORLD_SIZE", "")
	if _, _, errs := call("--nope"); strings.Contains(errs, "rank") {
		t.Errorf("one process alone: %s", errs)
	}
}

// Every verb has a separate help text with usage, flags, an example and exit codes. The program's
// help and docs/job-file.md describe every exit code in the same words.
func TestHelp(t *testing.T) {
	help := func(verb string) string {
		_, out, _ := call(verb, "--help")
		return out
	}
	for _, v := range verbs {
		for _, args := range [][]string{{v.name, "--help"}, {"help", v.name}, {"-h", v.name}} {
			code, out, errs := call(args...)
			if code != status.OK || errs != "" || !strings.HasPrefix(out, "usage: ulysses-mpi "+v.use()) ||
				!strings.Contains(out, "\nexample:\n  "+strings.Split(v.example, "\n")[0]) ||
				!strings.Contains(out, "\nexit codes:\n   0  ") {
				t.Errorf("%v: %v\n%s%s", args, code, out, errs)
			}
			for name, of := range flagVerbs {
				if strings.Contains(out, " --"+name+" ") != slices.Contains(of, v.name) {
					t.Errorf("%v: --%s is a flag of %v\n%s", args, name, of, out)
				}
			}
			// The exit code of supervise is that of the job.
			if _, codes, _ := strings.Cut(out, "\nexit codes:"); v.name == "supervise" &&
				!strings.HasSuffix(help("run"), codes) {
				t.Errorf("%v lists other exit codes than run:%s", args, codes)
			}
			for _, line := range strings.Split(out, "\n") {
				if len(line) > 110 {
					t.Errorf("%v: a line of %d characters: %s", args, len(line), line)
				}
			}
		}
	}
	_, out, _ := call("--help")
	for _, x := range exitCodes {
		if row := fmt.Sprintf("\n  %2d  %s\n", x.code, x.meaning); !strings.Contains(out, row) {
			t.Errorf("ulysses-mpi --help has no line %q", row)
		}
		if row := fmt.Sprintf("\n| %d | %s |\n", x.code, x.meaning); !strings.Contains(text(t, "../docs/job-file.md"),
			row) {
			t.Errorf("docs/job-file.md has no line %q", row)
		}
	}
	for c := status.Code(0); c < 128; c++ {
		named := !strings.HasPrefix(c.String(), "status ")
		if named != slices.ContainsFunc(exitCodes, func(x exitCode) bool { return x.code == c }) {
			t.Errorf("exit code %d (%v) is in one table and not in the other", c, c)
		}
	}
	for _, v := range verbs {
		if !strings.Contains(out, "\n  "+v.use()+"  ") {
			t.Errorf("ulysses-mpi --help does not list %s", v.name)
		}
		if !regexp.MustCompile(`\n\| verb \|.*` + "`" + v.name + "`").MatchString(text(t, "../docs/glossary.md")) {
			t.Errorf("docs/glossary.md does not list %s", v.name)
		}
	}
	// A plan for a GPU of this machine may find none.
	t.Setenv("ULYSSES_CUDA_PLUGIN", filepath.Join(t.TempDir(), "none.so"))
	if code, _, errs := call("plan", "../examples/quickstart.toml", "--set",
		"device.backend=cuda"); code != status.Device || !strings.Contains(help("plan"), fmt.Sprintf("\n%4d  ", code)) {
		t.Errorf("plan ends with %d: %s\n%s", code, errs, help("plan"))
	}
	if ranks := "run N ranks inside this process"; strings.Contains(help("plan"), ranks) ||
		!strings.Contains(help("verify"), ranks) {
		t.Errorf("--ranks of plan starts ranks\n%s", help("plan"))
	}
}

// The help text of a verb lists the codes with which the verb refuses jobs and folders.
func TestHelpListsTheCodes(t *testing.T) {
	dir, model, source := t.TempDir(), t.TempDir(), filepath.Join(goldens, "models", "qwen3")
	if err := os.CopyFS(model, os.DirFS(source)); err != nil {
		t.Fatal(err)
	}
	const weights = "model.safetensors"
	writeTensors(t, filepath.Join(source, weights), filepath.Join(model, weights),
		func(_ string, shape []int64, x []float32) []int64 {
			x[0] = float32(math.NaN())
			return shape
		})
	put(t, filepath.Join(dir, "adapter_config.json"), `{"peft_type": "LORA", "r": 1, "lora_alpha": 1,
		"target_modules": ["q_proj"], "use_dora": true, "base_model_name_or_path": "`+model+`"}`)
	job := []string{"../examples/quickstart.toml", "--set", "device.comm=nccl", "--set", "device.backend=cpu"}
	for _, x := range []struct {
		code status.Code
		args []string
	}{
		{status.Unsupported, append([]string{"plan"}, job...)},
		{status.Unsupported, append([]string{"sbatch"}, job...)},
		{status.Unsupported, append([]string{"supervise"}, append(job, "--", "mpirun")...)},
		{status.Unsupported, append([]string{"doctor", "--cluster"}, job...)},
		{status.Unsupported, []string{"export", "--merge", dir, filepath.Join(dir, "merged")}},
		{status.Numeric, []string{"generate", model, "the"}},
	} {
		code, _, errs := call(x.args...)
		if code != x.code {
			t.Errorf("%q: %v: %s", x.args, code, errs)
		}
		_, help, _ := call(x.args[0], "--help")
		if !strings.Contains(help, fmt.Sprintf("\n%4d  ", x.code)) {
			t.Errorf("%s --help does not list %d\n%s", x.args[0], x.code, help)
		}
	}
}

// A command that only submits a job ends at once with 0, and the job would count as done.
func TestSuperviseRefusesSubmission(t *testing.T) {
	submit := filepath.Join(t.TempDir(), "sbatch")
	put(t, submit, "#!/bin/sh\n")
	if err := os.Chmod(submit, 0o755); err != nil {
		t.Fatal(err)
	}
	code, _, errs := call("supervise", "../examples/quickstart.toml", "--", submit, "train.sbatch")
	if code != status.InvalidArgument || !strings.Contains(errs, "supervise: sbatch only submits a job") {
		t.Errorf("%v: %s", code, errs)
	}
}

// An empty path, as of an unset variable of a shell, stands for nothing.
func TestEmptyWords(t *testing.T) {
	for want, args := range map[string][]string{
		"run: job file is empty; name one":          {""},
		"plan: job file is empty; name one":         {"plan", ""},
		"eval: folder is empty; name one":           {"eval", "a.toml", ""},
		"export: checkpoint is empty; name one":     {"export", "", "m"},
		"export: folder is empty; name one":         {"export", "out", ""},
		"diagnose: folder is empty; name one":       {"diagnose", ""},
		"init: model-folder is empty; name one":     {"init", ""},
		"sbatch: --array: empty; give a list":       {"sbatch", "a.toml", "--array="},
		"sbatch: --image: empty; name a file":       {"sbatch", "a.toml", "--image="},
		"supervise: the launcher is missing":        {"supervise", "a.toml", "--", ""},
		"generate: model-folder is empty; name one": {"generate", "", "a"},
		"there is no folder none":                   {"generate", "none", ""}, // a prompt may be empty
	} {
		if code, out, errs := call(args...); code == status.OK || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%q: %v: %s%s", args, code, out, errs)
		}
	}
}

// Flags may be in front of the verb. The error for a flag of another verb names that verb, and the
// error for a mistyped verb names the likely one.
func TestFlagsAndVerbs(t *testing.T) {
	for args, want := range map[string]string{
		"--search plan": "plan: job file is missing", "--cluster c plan a b": "plan: there are 2 job files",
		"doctor --json":       "doctor: --json is a flag of verify, diagnose",
		"version --json":      "version: this verb has no flags",
		"doctor --ranks 2":    "doctor: --ranks and --set are for the ranks of a job; add --cluster job.toml",
		"doctor --cluster=":   "doctor: --cluster: empty; name a file",
		"logits a --logits":   "logits: --logits: nothing is done with them; add --tensors or --compare",
		"run a.toml --search": "run: --search is a flag of plan", "--json a.toml": "run: --json is a flag of verify",
		"verfiy a.toml":                  "verfiy: unknown verb; did you mean verify?",
		"a.toml -x":                      "unknown flag -x;",
		"train a.toml":                   "train: unknown verb; a job file is run without a verb: ulysses-mpi a.toml",
		"docter":                         "docter: neither a verb nor a job file; did you mean doctor?",
		"-ranks 3 -set a= a.toml b.toml": "there are 2 job files",
		"plan x --cluster":               "flag needs an argument: --cluster",
		"completion tcsh":                "completion tcsh: no script for this shell; use bash, fish, powershell, zsh",
		"completion bash zsh":            "completion: there are 2 shells: bash, zsh",
		"diagnose a b":                   "diagnose: there are 2 folders: a, b",
		"eval a.toml b c":                "eval: there are 2 folders: b, c", "help nope": "help nope: unknown verb",
		"help run --json": "help: this verb has no flags; remove them", "help -n 2": "help: this verb has no flags",
		"a.toml -n 2.5":                `invalid value "2.5" for --ranks: a whole number is needed`,
		"generate m --top-p x":         `invalid value "x" for --top-p: a number is needed`,
		"generate m --temperature -1":  "generate: --temperature -1: set 0 to 1e6",
		"generate m --temperature nan": "generate: --temperature NaN: set 0 to 1e6",
		"generate m --top-k -2":        "generate: --top-k -2: set 0 or more",
		"generate m --top-p 2":         "generate: --top-p 2: set a number above 0 and at most 1",
		"generate m --device gpu":      "generate: --device gpu: set auto, cpu or cuda",
		"generate m --dtype fp16":      "generate: --dtype fp16: set auto, f32 or bf16",
	} {
		if code, out, errs := call(strings.Fields(args)...); code != status.InvalidArgument || out != "" ||
			!strings.Contains(errs, want) {
			t.Errorf("%s: %v: %s%s", args, code, out, errs)
		}
	}
	if verb, o, err := parseArgs(strings.Fields("-set a=1 --search -n=3 plan x.toml --set b=1,2")); err != nil ||
		verb != "plan" || !o.search || o.Ranks != 3 || strings.Join(o.Sets, " ") != "a=1 b=1,2" {
		t.Errorf("%s %+v %v", verb, o, err)
	}
}

// A shell completes verbs, the keys of --set and their words, and job files.
func TestCompletion(t *testing.T) {
	for args, want := range map[string]string{
		"pl": "plan\tpredict", "--set optimizer.na": "optimizer.name=\n",
		"--set optimizer.name=": "optimizer.name=adamw\noptimizer.name=sgd\n",
		"plan --set data.pack=": "data.pack=true\ndata.pack=false\n", "verify ": "toml\n:8",
		"completion ": "bash\nfish\npowershell\nzsh\n", "plan --s": "--search",
	} {
		code, out, errs := call(append([]string{"__complete"}, strings.Split(args, " ")...)...)
		if code != status.OK || errs != "" || !strings.Contains(out, want) {
			t.Errorf("%s: %v\n%s%s", args, code, out, errs)
		}
	}
	if _, out, _ := call("__complete", "verify", "--s"); strings.Contains(out, "--search") {
		t.Errorf("verify has no --search: %s", out)
	}
	for _, shell := range shellNames() {
		if code, out, errs := call("completion", shell); code != status.OK || errs != "" ||
			!strings.Contains(out, "ulysses-mpi __complete") && !strings.Contains(out, "__complete") {
			t.Errorf("%s: %v\n%s%s", shell, code, out, errs)
		}
	}
}
