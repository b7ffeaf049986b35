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

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
	vers "ulysses/internal/version"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/slurm"
)

// Main runs the command line args and returns the exit code. It prints errors on stderr, once for
// the whole job if all ranks have the same error.
func Main(args []string, stdout, stderr io.Writer) (code status.Code) {
	defer func() {
		if p := recover(); p != nil {
			code = status.Internal
			fmt.Fprintf(stderr, "ulysses-mpi: internal error: %v (%s)\n", p, panicPosition())
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
		backends.OwnProcess()
		o.args = append([]string{os.Args[0]}, args...)
		if name != "supervise" { // which passes signals on
			o.signals = launch.CatchSignals(name, stderr)
			defer o.signals.Release()
		}
		err = verbOf(name).run(o)
	}
	var printed endedWith
	if errors.As(err, &printed) {
		return status.Code(printed)
	}
	o.complain(err)
	return status.Of(err)
}

// maxRanks is the largest number of ranks in one process.
const maxRanks = 1024

// complain writes the error. If all ranks agreed on it, only the first rank writes it. A failure of
// communication, of a device or of this program belongs to one rank, unless rank 0 has the same
// error (comm.Told). An error from before the ranks agree is also one rank's own. Each rank writes
// such an error with its name. With --log json the error is a line of the log.
func (o *Options) complain(err error) {
	if err == nil {
		return
	}
	own := ofOneRank(err) && !comm.Told(err)
	env := slurm.Env()
	var ownError launch.OwnError
	lone := errors.As(err, &ownError)
	if env.Rank > 0 && !own {
		// By then rank 0 has printed an error that all ranks have, and the launcher has ended this
		// process.
		time.Sleep(silence)
		if !lone {
			return
		}
	}
	text := input.Words(file.WithoutLogins(withoutRanks(err)))
	if lone && env.Tasks > 1 {
		text = fmt.Sprintf("rank %d on %s: %s", env.Rank, env.Host, text)
	}
	if n := len(status.Faults(err)); n > 1 && !own {
		text = fmt.Sprintf("%d faults, %v:\n%s", n, status.Of(err), text)
	}
	if o.log == "json" {
		log := o.logger(&screen{to: o.Stderr}, env.Rank, env.Host)
		log.Error().Int32("exit_code", int32(status.Of(err))).Str("status", status.Of(err).String()).Msg(text)
		return
	}
	fmt.Fprintf(o.Stderr, "ulysses-mpi: %s\n", text)
}

// ofOneRank reports whether an error is a failure of communication, of a device or of this program.
// These belong to one rank.
func ofOneRank(err error) bool {
	code := status.Of(err)
	return code == status.Comm || code == status.Device || code == status.Internal
}

var (
	rankPrefix = regexp.MustCompile(`^rank (\d+)(?: on \S+)?: `)
	rankCount  = regexp.MustCompile(` \((\d+) of (\d+) ranks failed\)$`)
)

// withoutRanks returns the text of an error without the names of ranks that each layer has put
// before an agreed error. It keeps the last name if the failure belongs to one rank, or if the rank
// is not 0 and not all ranks have failed.
func withoutRanks(err error) string {
	text, everywhere := err.Error(), false
	if m := rankCount.FindStringSubmatch(text); m != nil && m[1] == m[2] {
		everywhere, text = true, strings.TrimSuffix(text, m[0])
	}
	prefix, rank := "", ""
	for m := rankPrefix.FindStringSubmatch(text); m != nil; m = rankPrefix.FindStringSubmatch(text) {
		prefix, rank, text = m[0], m[1], text[len(m[0]):]
	}
	named := strings.HasPrefix(text, "rank "+rank+" ")
	if prefix == "" || named || !ofOneRank(err) && (rank == "0" || everywhere) {
		return text
	}
	return prefix + text
}

// silence is the time for which other ranks wait until rank 0 has printed an error, because a
// launcher kills all processes when one exits with an error.
const silence = 300 * time.Millisecond

// onFirstRank runs a verb that only prints something, on rank 0 alone.
func onFirstRank(f func() error) error {
	env := slurm.Env()
	switch {
	case env.Rank == 0:
		return f()
	case launch.LeftOver(env): // there may be no rank 0
		return launch.Own(f())
	}
	return nil
}

// version is the verb version.
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
	return fmt.Sprintf("ulysses-mpi %s, %s, %s, %s %s/%s", vers.String, commit, mpi, runtime.Version(), runtime.GOOS,
		runtime.GOARCH)
}

// written returns the error of writing to standard output.
func written(_ int, err error) error {
	if err != nil {
		return status.Errorf(status.IO, "standard output: %w", err)
	}
	return nil
}

// panicPosition returns the function and line that panicked.
func panicPosition() string {
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
