package job

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/slurm"
)

const usage = `usage: ulysses-mpi [run] job.toml [--set table.key=value ...] [-n, --ranks N]
       ulysses-mpi plan job.toml [--search] [--cluster file.toml]   memory, traffic and time of a step; runs nothing
       ulysses-mpi verify job.toml [--json]   the same job on one rank and on all, compared tensor by tensor
       ulysses-mpi export checkpoint folder   a model's folder, as at the run's end, from a checkpoint or the newest of several
       ulysses-mpi doctor                what was found on this machine, and what is missing
       ulysses-mpi version

Under mpirun or srun each process is one rank. Started alone, --ranks N runs N ranks inside one process.

  --set table.key=value   replaces a key of the job file; a TOML value, else text; may be repeated
  -n, --ranks N           ranks inside this process (default 1); of a plan, ranks to plan for
  --search                of a plan: the best mesh for these ranks, and the longest sequence that fits
  --cluster file.toml     of a plan: a machine that need not be this one (docs/plan.md)
  --json                  of verify: what it found as one JSON object, for programs
  -h, --help              this text

The keys of a job file are in docs/job-file.md. The exit code is 0, or says what failed: 1 command line, 2 job file, model or data,
3 not built, 4 memory, 5 communication, 6 device, 7 files, 8 numbers, 10 a fault of this program, 75 stopped in time, 77 nothing to run on.
`

// verbs maps a verb to what it does and the words that follow it. Flags are for verbs that take a job file.
var verbs = map[string]struct {
	words []string
	run   func(o Options) error
}{
	"run":     {[]string{jobFile}, Run},
	"plan":    {[]string{jobFile}, func(o Options) error { return onFirstRank(func() error { return Plan(o) }) }},
	"verify":  {[]string{jobFile}, Verify},
	"export":  {[]string{"checkpoint", "folder"}, func(o Options) error { return onFirstRank(func() error { return export(o) }) }},
	"doctor":  {nil, func(o Options) error { return onFirstRank(func() error { return Doctor(o.Stdout) }) }},
	"version": {nil, func(o Options) error { return onFirstRank(func() error { return version(o.Stdout) }) }},
}

const jobFile = "job file"

// Main is the command line without the process: it does what args say and returns the exit code. Failures go to stderr, once for the
// whole job where all ranks share them.
func Main(args []string, stdout, stderr io.Writer) (code status.Code) {
	defer func() {
		if p := recover(); p != nil {
			code = status.Internal
			fmt.Fprintf(stderr, "ulysses-mpi: a fault of this program: %v (%s)\n", p, panicPlace())
		}
	}()
	verb, o, err := parseArgs(args)
	if err = unmet(err); errors.Is(err, flag.ErrHelp) {
		if _, err := io.WriteString(stdout, usage); err != nil {
			return status.IO
		}
		return status.OK
	}
	o.Stdout, o.Stderr = stdout, stderr
	if err == nil {
		err = verbs[verb].run(o)
	}
	complain(stderr, err)
	return status.Of(err)
}

// parseArgs reads flags before and behind the verb and the job file.
func parseArgs(args []string) (verb string, o Options, err error) {
	f := flag.NewFlagSet("ulysses-mpi", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Func("set", "", func(s string) error {
		if name, _, ok := strings.Cut(s, "="); !ok || strings.TrimSpace(name) == "" {
			return errors.New("table.key=value is needed")
		}
		o.Sets = append(o.Sets, s)
		return nil
	})
	f.IntVar(&o.Ranks, "ranks", 0, "")
	f.IntVar(&o.Ranks, "n", 0, "")
	f.BoolVar(&o.search, "search", false, "")
	f.StringVar(&o.cluster, "cluster", "", "")
	f.BoolVar(&o.json, "json", false, "")
	fail := func(format string, args ...any) (string, Options, error) {
		return "", o, status.Errorf(status.InvalidArgument, "%s; see ulysses-mpi --help", fmt.Sprintf(format, args...))
	}
	var words []string
	for len(args) > 0 {
		if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
			return "", o, err
		} else if err != nil {
			return fail("%v", err)
		}
		if args = f.Args(); len(args) > 0 {
			words, args = append(words, args[0]), args[1:]
		}
	}
	given := map[string]bool{}
	f.Visit(func(x *flag.Flag) { given[x.Name] = true })
	if len(words) == 0 {
		return fail("a job file or a verb is needed")
	}
	verb = "run"
	if _, ok := verbs[words[0]]; ok {
		verb, words = words[0], words[1:]
	} else if words[0] == "help" {
		return "", o, flag.ErrHelp
	}
	most := maxRanks
	if verb == "plan" {
		most = maxPlanned
	}
	switch want := verbs[verb].words; {
	case (given["n"] || given["ranks"]) && (o.Ranks < 1 || o.Ranks > most):
		return fail("--ranks %d: 1 to %d are possible", o.Ranks, most)
	case verb != "plan" && (given["search"] || given["cluster"]):
		return fail("%s: --search and --cluster are of plan", verb)
	case verb != "verify" && given["json"]:
		return fail("%s: --json is of verify", verb)
	case given["cluster"] && o.cluster == "":
		return fail("plan: --cluster needs a file")
	case len(want) == 0 && len(words) > 0:
		return fail("%s takes no %q", verb, words[0])
	case len(words) < len(want):
		return fail("%s: a %s is needed", verb, want[len(words)])
	case len(words) > len(want):
		if _, isVerb := verbs[words[1]]; isVerb {
			return fail("%s %s: the verb comes first", words[0], words[1])
		}
		if len(want) > 1 {
			return fail("%s: a %s are needed, and there are %d words: %s", verb, strings.Join(want, " and a "), len(words), strings.Join(words, ", "))
		}
		return fail("%s: one job file is needed, and there are %d: %s", verb, len(words), strings.Join(words, ", "))
	case len(given) > 0 && !slices.Contains(want, jobFile):
		return fail("%s takes no flags", verb)
	}
	o.words = words
	if slices.Contains(verbs[verb].words, jobFile) {
		o.Path = words[0]
	}
	return verb, o, nil
}

// maxRanks bounds the ranks in one process; each is goroutines and memory here, not a machine.
const maxRanks = 1024

// early is an error of a rank that has not met the others: of its own command line or environment. No other rank knows of it.
type early struct{ error }

func (e early) Unwrap() error { return e.error }

func unmet(err error) error {
	if err == nil {
		return nil
	}
	return early{err}
}

// complain writes the error. All ranks return what they agreed on, so the first speaks for them; but a failure of communication, of a
// device or of this program is each rank's own, and so is what ended it before they met: that says of whom it is.
func complain(stderr io.Writer, err error) {
	if err == nil {
		return
	}
	own := map[status.Code]bool{status.Comm: true, status.Device: true, status.Internal: true}[status.Of(err)]
	env := slurm.Env()
	var alone early
	lone := errors.As(err, &alone)
	if env.Rank > 0 && !own {
		time.Sleep(silence) // what all share, the first has said by then, and the launcher has ended this process
		if !lone {
			return
		}
	}
	text := withoutRanks(err.Error())
	if lone && env.Tasks > 1 {
		text = fmt.Sprintf("rank %d on %s: %s", env.Rank, env.Host, text)
	}
	if lines := strings.Count(text, "\n") + 1; lines > 1 && !own {
		text = fmt.Sprintf("%d faults, %v:\n%s", lines, status.Of(err), text)
	}
	fmt.Fprintf(stderr, "ulysses-mpi: %s\n", text)
}

var (
	rankPrefix = regexp.MustCompile(`^rank (\d+): `)
	rankCount  = regexp.MustCompile(` \((\d+) of (\d+) ranks failed\)$`)
)

// withoutRanks takes from an agreed error the ranks that every layer put before it, but for one that tells something: a rank other than
// the first, in a failure that not all share.
func withoutRanks(text string) string {
	shared := false
	if m := rankCount.FindStringSubmatch(text); m != nil && m[1] == m[2] {
		shared, text = true, strings.TrimSuffix(text, m[0])
	}
	rank := ""
	for m := rankPrefix.FindStringSubmatch(text); m != nil; m = rankPrefix.FindStringSubmatch(text) {
		rank, text = m[1], text[len(m[0]):]
	}
	if rank == "" || rank == "0" || shared || strings.HasPrefix(text, "rank "+rank+" ") {
		return text
	}
	return "rank " + rank + ": " + text
}

// silence is how long the other ranks wait for the first to speak: a launcher kills all processes when one exits with a failure.
const silence = 300 * time.Millisecond

// onFirstRank keeps a verb that only tells something from telling it once a process.
func onFirstRank(f func() error) error {
	if slurm.Env().Rank > 0 {
		return nil
	}
	return f()
}

func version(w io.Writer) error { return written(fmt.Fprintln(w, programVersion())) }

// programVersion is the program, its revision and what it was built with.
func programVersion() string {
	mpi := "without MPI"
	if comm.Available() {
		mpi = "with MPI"
	}
	revision := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = " " + s.Value[:min(12, len(s.Value))]
			}
		}
	}
	return fmt.Sprintf("ulysses-mpi %s%s, %s, %s %s/%s", Version, revision, mpi, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// Version is that of the command line and the job file.
const Version = "0.1"

func written(_ int, err error) error {
	if err != nil {
		return status.Errorf(status.IO, "standard output: %w", err)
	}
	return nil
}

// panicPlace is the function and line of ours that panicked, for a report of one line.
func panicPlace() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs)])
	panicked := false
	for {
		f, more := frames.Next()
		if panicked && !strings.HasPrefix(f.Function, "runtime.") {
			return fmt.Sprintf("%s, line %d; please report it", f.Function, f.Line)
		}
		panicked = panicked || f.Function == "runtime.gopanic"
		if !more {
			return "please report it"
		}
	}
}
