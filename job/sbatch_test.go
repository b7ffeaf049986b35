package job

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"text/template"

	"ulysses/internal/status"
)

var updateTemplates = flag.Bool("update-templates", false, "write slurm/*.sbatch")

// The templates in slurm/ are what the verb sbatch prints.
func TestSbatchTemplates(t *testing.T) {
	for name, x := range map[string]struct {
		sbatchOptions
		program, job string
		sets         []string
		restarts     int
	}{
		"cpu": {sbatchOptions{nodes: 2, tasks: 4, cpus: 8, time: "4:00:00"}, "bin/ulysses-mpi",
			"job.toml", nil, 0},
		"gpu": {sbatchOptions{nodes: 2, gpus: 8, cpus: 16, time: "1-00:00:00"}, "bin/ulysses-mpi",
			"job.toml", nil, 3},
		"apptainer": {sbatchOptions{nodes: 2, gpus: 8, cpus: 16, time: "4:00:00", image: "ulysses.sif"}, "ulysses-mpi",
			"job.toml", nil, 0},
		"array": {sbatchOptions{nodes: 1, gpus: 8, time: "4:00:00", array: "0-3"}, "bin/ulysses-mpi", "job.toml",
			[]string{"seed=$SLURM_ARRAY_TASK_ID"}, 0},
	} {
		var text strings.Builder
		if err := template.Must(template.New("").Parse(sbatchTemplate)).Execute(&text,
			x.batch(x.program, x.job, "out", x.sets, nil, x.restarts)); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join("..", "slurm", name+".sbatch")
		if *updateTemplates {
			if err := os.WriteFile(path, []byte(text.String()), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text.String() {
			t.Errorf("%s is not what the verb prints (%v); run go test ./job -run Sbatch -update-templates", path, err)
		}
		if out, err := exec.Command("bash", "-n", path).CombinedOutput(); err != nil {
			t.Errorf("%s: %s", path, out)
		}
	}
}

// The script excludes interfaces that no other node can reach, if there are such and neither the
// user nor the site has told Open MPI which to use.
func TestSbatchInterfaces(t *testing.T) {
	for _, c := range []struct{ net, info, want string }{
		{"eth0", "mca:btl:tcp:param:btl_tcp_if_include:source:default", "none"},
		{"docker0", "mca:btl:tcp:param:btl_tcp_if_include:source:default", "lo,docker0,virbr0"},
		{"virbr0", "", "lo,docker0,virbr0"},
		{"docker0", "mca:btl:tcp:param:btl_tcp_if_include:source:environment", "none"},
		{"docker0", "mca:btl:tcp:param:btl_tcp_if_exclude:source:file (/etc/openmpi/openmpi-mca-params.conf:3)",
			"none"},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, c.net), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "ompi_info"), []byte("#!/bin/sh\necho '"+c.info+"'\n"),
			0o700); err != nil {
			t.Fatal(err)
		}
		_, lines, _ := strings.Cut(strings.ReplaceAll(sbatchTemplate, "/sys/class/net", dir), "# No other node")
		lines, _, _ = strings.Cut(lines, "launch=(")
		cmd := exec.Command("bash", "-c", "#"+lines+`echo "${OMPI_MCA_btl_tcp_if_exclude:-none}"`)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "OMPI_MCA_btl_tcp_if_exclude=")
		if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != c.want {
			t.Errorf("%+v: %s %v", c, out, err)
		}
	}
}

// A script has the words of the command line as they are, except for the variables of an array.
func TestSbatchQuotes(t *testing.T) {
	for word, want := range map[string]string{
		"a=1": "a=1", "": `""`, "it's $HOME": `"it's \$HOME"`, "a=\"x`y\\z\"": "\"a=\\\"x\\`y\\\\z\\\"\"",
		"seed=$SLURM_ARRAY_TASK_ID":        `"seed=$SLURM_ARRAY_TASK_ID"`,
		"d=${SLURM_ARRAY_TASK_ID}-${DATA}": `"d=${SLURM_ARRAY_TASK_ID}-\${DATA}"`,
	} {
		got := quoteForScript(word)
		if got != want {
			t.Errorf("%s: %s, want %s", word, got, want)
		}
		if !strings.Contains(word, "SLURM") {
			if out, err := exec.Command("bash", "-c", "printf %s "+got).Output(); err != nil || string(out) != word {
				t.Errorf("%s: the shell reads %s %v", word, out, err)
			}
		}
	}
}

// sbatch splits the lines #SBATCH into words: a name with a space must stay one word.
// TestSlurm submits such a script.
func TestSbatchLines(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, `it's "run" #1.toml`)
	if err := os.Rename(filepath.Join(dir, "job.toml"), job); err != nil {
		t.Fatal(err)
	}
	code, text, stderr := call("sbatch", job, "--", "--comment=two words", "-p", "gpu", `--constraint=a\b`)
	if code != status.OK {
		t.Fatalf("exit %v: %s", code, stderr)
	}
	for _, want := range []string{`--job-name="it's \"run\" #1"`, `"--comment=two words"`, "-p", "gpu",
		`"--constraint=a\\b"`} {
		if !strings.Contains(text, "\n#SBATCH "+want+"\n") {
			t.Errorf("the script has no line #SBATCH %s:\n%s", want, text)
		}
	}
}

// A time limit that the signal before it uses up is named: minutes are easily taken for hours.
func TestSbatchTimeLimit(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, "job.toml")
	for limit, want := range map[string]string{"2": "is 2m0s", "2:30": "is 2m30s", "0:2:59": "is 2m59s",
		"0-0:3": "is 3m0s", "4": "", "0": "", "2:00:00": "", "1-0": "", "1-12:00:00": ""} {
		code, text, stderr := call("sbatch", job, "--time", limit)
		if code != status.OK || !strings.Contains(text, "#SBATCH --time="+limit+"\n") || want == "" && stderr != "" ||
			!strings.Contains(stderr, want) {
			t.Errorf("--time %s: exit %v, not %q: %s", limit, code, want, stderr)
		}
	}
}

// A --signal among the options of sbatch replaces the one of the verb, also for the warning.
func TestSbatchSignal(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, "job.toml")
	for _, x := range []struct{ limit, signal, want string }{
		{"10:00", "--signal=USR1@600", "signals the ranks 600 to 660 s before the limit"}, {"10:00", "--signal=USR1@60", ""},
		{"3:00", "--signal=USR1@60", ""}, {"2:00", "--signal=USR1", "signals the ranks 60 to 120 s before"},
		{"10:00", "--signal=B:USR1@60", "with B: the signal goes to the script alone"},
		{"10:00", "--signal=R:USR1@60", ""}, {"10:00", "--partition=gpu", ""},
	} {
		code, _, stderr := call("sbatch", job, "--time", x.limit, "--", x.signal)
		if code != status.OK || x.want == "" && stderr != "" || !strings.Contains(stderr, x.want) {
			t.Errorf("--time %s %s: exit %v, not %q: %s", x.limit, x.signal, code, x.want, stderr)
		}
	}
}

func TestSbatchFaults(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, "job.toml")
	script := filepath.Join(dir, "x.sbatch")
	for _, x := range []struct {
		args []string
		code status.Code
		want string
	}{
		{[]string{"--nodes", "2", "--gpus-per-node", "4", "-o", script}, status.OK, "submit it with: sbatch " + script},
		{[]string{"-o", script}, status.IO, "exists; name another file with -o"},
		{[]string{"--gpus-per-node", "8", "--ntasks-per-node", "4"}, status.OK,
			"\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=8\n"},
		{[]string{"--nodes", "0"}, status.InvalidArgument, "--nodes 0: not a number of nodes"},
		{[]string{"--time", "soon"}, status.InvalidArgument, "not a time of Slurm"},
		{[]string{"--array", "a"}, status.InvalidArgument, "not a list of Slurm"},
		{[]string{"--gpus-per-node", "4", "--ntasks-per-node", "8"}, status.InvalidArgument, "each rank needs a GPU"},
		{[]string{"--image", "a.sif", "--restarts", "1"}, status.InvalidArgument, "leave out one of them"},
		{[]string{"--set", "data.sequnce=1"}, status.InvalidConfig, "data.sequnce"},
		{[]string{"--set", "seed=$SLURM_ARRAY_TASK_ID"}, status.InvalidArgument,
			"only jobs of an array have SLURM_ARRAY_TASK_ID; add for example --array 0-3"},
		{[]string{"--array", "0-3", "--set", "seed=$SLURM_ARRAY_TASK_IDX"}, status.InvalidArgument,
			"Slurm has no variable SLURM_ARRAY_TASK_IDX; use $SLURM_ARRAY_TASK_ID"},
		{[]string{"--array", "0-3", "--set", "sede=$SLURM_ARRAY_TASK_ID"}, status.InvalidConfig, "did you mean seed?"},
		{[]string{"--array", "7-9", "--set", "train.steps=-${SLURM_ARRAY_TASK_ID}"}, status.InvalidConfig, "-7"},
		{[]string{"--array", "0-3", "--set", "train.steps=$SLURM_ARRAY_TASK_COUNT", "--set",
			"data.path=${SLURM_ARRAY_JOB_ID}.jsonl", "--set", "output.dir=${SCRATCH_OF_JOB}/x"}, status.OK,
			`"train.steps=$SLURM_ARRAY_TASK_COUNT"`},
		{[]string{"--", "--comment=a\nb"}, status.InvalidArgument, "a line #SBATCH ends at a line break"},
		{[]string{"--", "--partition=gpu"}, status.OK, "\n#SBATCH --partition=gpu\n"},
	} {
		code, stdout, stderr := call(append([]string{"sbatch", job}, x.args...)...)
		if code != x.code || !strings.Contains(stdout+stderr, x.want) {
			t.Errorf("%v: exit %v: %s%s", x.args, code, stdout, stderr)
		}
	}
	text, err := os.ReadFile(script)
	for _, want := range []string{"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--signal=USR1@120",
		"--requeue", "--open-mode=append", "--kill-on-bad-exit=1", "run " + job, "scontrol requeue"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("the script has no %q: %s %v", want, text, err)
		}
	}
}
