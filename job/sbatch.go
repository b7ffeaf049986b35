package job

import (
	"cmp"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// sbatchOptions are the flags of the verb sbatch.
type sbatchOptions struct {
	nodes, tasks, gpus, cpus int
	time, array, image       string
}

// signalBefore is the number of seconds before the time limit at which the ranks get SIGUSR1.
const signalBefore = 120

//go:embed sbatch.tmpl
var sbatchTemplate string

// batch is what the template of a batch script has.
type batch struct {
	Name                     string // quoted for sbatch
	Time, Array, Image, Log  string
	Nodes, Tasks, GPUs, CPUs int
	Before                   int      // signalBefore
	More                     []string // options of sbatch that the user has added; quoted for sbatch
	Restarts                 int
	Program, Job             string // quoted for a shell
	Arguments                string // of the program, after the job file; quoted
}

var (
	slurmTime = regexp.MustCompile(`^(\d+-)?\d+(:\d{1,2}){0,2}$`)
	arrayList = regexp.MustCompile(`^\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?$`)
)

// sbatch is the verb sbatch: it prints a batch script for Slurm, or writes it to --output.
func sbatch(o Options) error {
	b, err := newBatch(&o)
	if err != nil {
		return err
	}
	before, reaches := signalOf(o.launcher)
	if !reaches {
		o.warn("sbatch: --signal: with B: the signal goes to the script alone, which ends and writes no checkpoint; write for example --signal=USR1@600")
	}
	// Slurm checks limits once a minute.
	if limit := timeLimit(b.Time); limit > 0 && limit <= time.Duration(before+60)*time.Second {
		o.warn(fmt.Sprintf(
			"sbatch: --time %s is %v, and Slurm signals the ranks %d to %d s before the limit: after each start the job soon stops with a checkpoint, and starts again; four hours are --time 4:00:00",
			b.Time, limit, before, before+60))
	}
	t := template.Must(template.New("sbatch").Parse(sbatchTemplate))
	var text strings.Builder
	if err := t.Execute(&text, b); err != nil {
		return status.Errorf(status.Internal, "sbatch: %w", err)
	}
	if !o.outputSet {
		return written(fmt.Fprint(o.Stdout, text.String()))
	}
	if err := writeNew("sbatch", o.output, text.String(), 0o777); err != nil {
		return err
	}
	return written(fmt.Fprintf(o.Stdout, "%s\nsubmit it with: sbatch %[1]s\n", o.output))
}

func newBatch(o *Options) (*batch, error) {
	s := &o.sbatch
	fault := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "sbatch: "+format, args...)
	}
	switch {
	case s.nodes < 1:
		return nil, fault("--nodes %d: not a number of nodes; set 1 or more", s.nodes)
	case s.gpus < 0 || s.tasks < 0 || s.cpus < 0:
		return nil, fault("--gpus-per-node %d, --ntasks-per-node %d, --cpus-per-task %d: negative; leave it out",
			s.gpus, s.tasks, s.cpus)
	case !slurmTime.MatchString(s.time):
		return nil, fault("--time %q: not a time of Slurm; write for example --time 4:00:00 or 1-12:00:00", s.time)
	case s.array != "" && !arrayList.MatchString(s.array):
		return nil, fault("--array %q: not a list of Slurm; write for example --array 0-3", s.array)
	case s.image != "" && o.restarts > 0:
		return nil, fault(
			"--image and --restarts: the supervisor starts the program outside of the image; leave out one of them")
	case strings.ContainsAny(filepath.Base(o.Path)+strings.Join(o.launcher, ""), "\r\n"):
		return nil, fault("%q: a line #SBATCH ends at a line break; rename the job file, or change the options after --",
			append([]string{filepath.Base(o.Path)}, o.launcher...))
	case s.gpus > 0 && s.tasks > s.gpus:
		return nil, fault(
			"--ntasks-per-node %d and --gpus-per-node %d: each rank needs a GPU; leave out --ntasks-per-node",
			s.tasks, s.gpus)
	}
	src, err := file.Read(o.Path)
	if err != nil {
		return nil, err
	}
	sets, err := s.ofFirstTask(o.Sets)
	if err != nil {
		return nil, err
	}
	j, err := file.Parse(src, o.Path, sets, os.LookupEnv)
	if err != nil {
		return nil, err
	}
	path, err := filepath.Abs(o.Path)
	if err != nil {
		return nil, status.Errorf(status.IO, "sbatch: %w", err)
	}
	out, err := filepath.Abs(j.Output.Dir)
	if err != nil {
		return nil, status.Errorf(status.IO, "sbatch: %w", err)
	}
	program := "ulysses-mpi" // of the image
	if s.image == "" {
		if program, err = os.Executable(); err != nil {
			program = os.Args[0]
		}
	}
	return s.batch(program, path, out, o.Sets, o.launcher, o.restarts), nil
}

// ofFirstTask returns the --set arguments that can be checked now, with the values that variables
// of the array have in its first task. Other variables may exist only in the job.
func (s *sbatchOptions) ofFirstTask(sets []string) (known []string, err error) {
	for _, set := range sets {
		text := arrayIndex.ReplaceAllStringFunc(set, func(variable string) string {
			name := strings.Trim(variable, "${}")
			switch {
			case !slices.Contains(arrayVariables, name):
				err = status.Errorf(status.InvalidArgument,
					"sbatch: --set %s: Slurm has no variable %s; use $SLURM_ARRAY_TASK_ID", set, name)
			case s.array == "":
				err = status.Errorf(status.InvalidArgument,
					"sbatch: --set %s: only jobs of an array have %s; add for example --array 0-3", set, name)
			case name == "SLURM_ARRAY_TASK_ID":
				return firstIndex.FindString(s.array)
			}
			return "1"
		})
		if err != nil {
			return nil, err
		}
		if !strings.Contains(text, "$") {
			known = append(known, text)
		}
	}
	return known, nil
}

// batch returns what the script has: the program and the job file, its output.dir, --set arguments,
// further options of sbatch, and the number of restarts.
func (s *sbatchOptions) batch(program, job, out string, sets, more []string, restarts int) *batch {
	b := &batch{Name: quoteForSlurm(strings.TrimSuffix(filepath.Base(job), ".toml")), Time: s.time, Array: s.array,
		Log: "%x-%j.log", Nodes: s.nodes, Tasks: cmp.Or(s.tasks, s.gpus, 1), GPUs: s.gpus, CPUs: s.cpus,
		Before: signalBefore, Restarts: restarts, Program: quoteForScript(program),
		Job: quoteForScript(job)}
	for _, word := range more {
		b.More = append(b.More, quoteForSlurm(word))
	}
	if s.image != "" {
		b.Image = quoteForScript(s.image)
	}
	if s.array != "" {
		b.Log = "%x-%A_%a.log"
		if !hasSet(sets, "output.dir") { // the runs of an array need folders of their own
			b.Arguments = " --set " + quoteForScript("output.dir="+out+"-$SLURM_ARRAY_TASK_ID")
		}
	}
	for _, set := range sets {
		b.Arguments += " --set " + quoteForScript(set)
	}
	return b
}

// signalOf returns how many seconds before the time limit Slurm sends its signal, and whether the
// ranks get it. more are the options of sbatch that the user has added: the last --signal counts.
func signalOf(more []string) (before int, reaches bool) {
	before, reaches = signalBefore, true
	for i, word := range more {
		value, ok := strings.CutPrefix(word, "--signal=")
		if word == "--signal" && i+1 < len(more) {
			value, ok = more[i+1], true
		}
		if !ok {
			continue
		}
		flags, name, flagged := strings.Cut(value, ":")
		if !flagged {
			flags, name = "", value
		}
		_, seconds, timed := strings.Cut(name, "@")
		n, err := strconv.Atoi(seconds)
		if before = 60; timed && err == nil { // Slurm's default
			before = n
		}
		reaches = !strings.Contains(flags, "B")
	}
	return before, reaches
}

// timeLimit returns the duration of a time of Slurm: minutes, minutes:seconds, or
// hours:minutes:seconds, and after days and a hyphen hours, hours:minutes or hours:minutes:seconds.
func timeLimit(text string) time.Duration {
	units := []time.Duration{time.Minute, time.Second}
	days, clock, ok := strings.Cut(text, "-")
	if !ok {
		days, clock = "0", text
	}
	if ok || strings.Count(clock, ":") == 2 {
		units = []time.Duration{time.Hour, time.Minute, time.Second}
	}
	n, _ := strconv.Atoi(days)
	sum := time.Duration(n) * 24 * time.Hour
	for i, word := range strings.Split(clock, ":") {
		n, _ := strconv.Atoi(word)
		sum += time.Duration(n) * units[i]
	}
	return sum
}

func hasSet(sets []string, key string) bool {
	for _, set := range sets {
		if name, _, _ := strings.Cut(set, "="); strings.TrimSpace(name) == key {
			return true
		}
	}
	return false
}

var (
	plainWord  = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)
	arrayIndex = regexp.MustCompile(`\$(SLURM_ARRAY_[A-Z_]+\b|\{SLURM_ARRAY_[A-Z_]+\})`)
	firstIndex = regexp.MustCompile(`^\d+`)
)

// arrayVariables are the variables of a job of an array (sbatch(1)).
var arrayVariables = []string{"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID",
	"SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"}

// quoteForSlurm quotes a word of a line #SBATCH. sbatch splits these lines at spaces, reads quotes
// and backslashes as a shell does, and ends a line at #. It replaces no variables.
func quoteForSlurm(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(word) + `"`
}

// quoteForScript quotes a word so that the shell replaces Slurm's variables of an array in it, and
// nothing else.
func quoteForScript(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	literal := func(text string) string {
		return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "`", "\\`", "$", `\$`).Replace(text)
	}
	quoted, at := `"`, 0
	for _, m := range arrayIndex.FindAllStringIndex(word, -1) {
		quoted += literal(word[at:m[0]]) + word[m[0]:m[1]]
		at = m[1]
	}
	return quoted + literal(word[at:]) + `"`
}
