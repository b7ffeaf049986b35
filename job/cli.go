package job

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"strings"
	"time"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
	vers "ulysses/internal/version"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/slurm"
)

// Main is the command line without the process: it does what args say and returns the exit code.
// Failures go to stderr, once for the whole job where all ranks share them.
func Main(args []string, stdout, stderr io.Writer) (code status.Code) {
	defer func() {
		if p := recover(); p != nil {
			code = status.Internal
			fmt.Fprintf(stderr, "ulysses-mpi: a fault of this program: %v (%s)\n", p, panicPlace())
		}
	}()
	name, o, err := parseArgs(args)
	o.Stdout, o.Stderr = stdout, stderr
	switch {
	case err != nil:
		err = launch.Own(err)
	case name == "":
		err = onFirstRank(func() error { return written(io.WriteString(stdout, o.text)) })
	default:
		o.args = append([]string{os.Args[0]}, args...)
		o.signals = launch.CatchSignals(name, stderr)
		defer o.signals.Release()
		err = verbOf(name).run(o)
	}
	o.complain(err)
	return status.Of(err)
}

// maxRanks bounds the ranks in one process; each is goroutines and memory here, not a machine.
const maxRanks = 1024

// complain writes the error. If all ranks agreed on it, only the first rank writes it. A failure of
// communication, of a device or of this program belongs to one rank. An error from before the ranks
// agree is also one rank's own. Each rank writes such an error with its name. With --log json the
// error is a line of the log.
func (o *Options) complain(err error) {
	if err == nil {
		return
	}
	own := map[status.Code]bool{status.Comm: true, status.Device: true, status.Internal: true}[status.Of(err)]
	env := slurm.Env()
	var ownError launch.OwnError
	lone := errors.As(err, &ownError)
	if env.Rank > 0 && !own {
		// what all share, the first has said by then, and the launcher has ended this process
		time.Sleep(silence)
		if !lone {
			return
		}
	}
	text := input.Words(file.WithoutLogins(withoutRanks(err.Error())))
	if lone && env.Tasks > 1 {
		text = fmt.Sprintf("rank %d on %s: %s", env.Rank, env.Host, text)
	}
	if n := status.Faults(err); n > 1 && !own {
		text = fmt.Sprintf("%d faults, %v:\n%s", n, status.Of(err), text)
	}
	if o.log == "json" {
		log := o.logger(&screen{to: o.Stderr}, env.Rank, env.Host)
		log.Error().Int32("exit_code", int32(status.Of(err))).Str("status", status.Of(err).String()).Msg(text)
		return
	}
	fmt.Fprintf(o.Stderr, "ulysses-mpi: %s\n", text)
}

var (
	rankPrefix = regexp.MustCompile(`^rank (\d+): `)
	rankCount  = regexp.MustCompile(` \((\d+) of (\d+) ranks failed\)$`)
)

// withoutRanks takes from an agreed error the ranks that every layer put before it, but for one
// that tells something: a rank other than the first, in a failure that not all share.
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

// silence is how long the other ranks wait for the first to speak: a launcher kills all processes
// when one exits with a failure.
const silence = 300 * time.Millisecond

// onFirstRank keeps a verb that only tells something from telling it once a process.
func onFirstRank(f func() error) error {
	if slurm.Env().Rank > 0 {
		return nil
	}
	return f()
}

func version(w io.Writer) error { return written(fmt.Fprintln(w, programVersion())) }

// programVersion returns one line: version, commit, and the compiler and options of the build.
func programVersion() string {
	mpi := "without MPI"
	if comm.Available() {
		mpi = "with MPI"
	}
	commit := "commit not recorded"
	if c := vers.Commit(); c != "" {
		commit = "commit " + c
	}
	return fmt.Sprintf("ulysses-mpi %s, %s, %s, %s %s/%s", vers.String, commit, mpi, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

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
