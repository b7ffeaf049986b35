// Package launch starts the ranks of a job and ends them.
//
// Start finds out how this process was started and runs a function for each rank in it: one rank
// under mpirun or srun, or goroutine ranks in one process. Signals handles signals from before MPI
// starts until the process ends; Stopper combines a signal with the time limit of the job. Command
// returns the command line that starts the job again. FaultHook makes a rank fail, for tests.
package launch

import (
	"cmp"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/slurm"
)

// Options says how the ranks of this process start.
type Options struct {
	Ranks int             // goroutine ranks; 0 = one, or the number of tasks of the launcher
	Print func(err error) // prints an error that ends the process inside Start
	// Folder is one that all ranks share, for their files until all have started; "" = none.
	Folder string
	Warn   func(text string) // prints a warning of this rank
	// Fault is an error of this rank, which all ranks return once they have started. A rank that
	// ended before would end the job without a message.
	Fault error
}

// Rank is a rank that has started.
type Rank struct {
	World   comm.Comm
	OnNode  int               // ranks of this rank's node; 0 = the launcher does not say
	Local   int               // index of this rank among them, if OnNode is known
	Timeout time.Duration     // of a collective, from the environment; 0 = none
	Late    func(text string) // must be called when a rank has exceeded Timeout, after World.Abort
}

// OwnError is an error of one rank from before the ranks can agree, such as a wrong command line or
// environment. The other ranks may not have it.
type OwnError struct{ error }

func (e OwnError) Unwrap() error { return e.error }

// Own returns err as an OwnError; nil stays nil.
func Own(err error) error {
	if err == nil {
		return nil
	}
	return OwnError{err}
}

// Start calls body once for each rank of this process and returns the process's error. alone says
// that the error of a rank is its own: the other ranks may wait for it in a collective, and body
// has aborted the job. Otherwise all ranks return the same error.
func Start(o Options, body func(Rank) (err error, alone bool)) error {
	// If the reader of standard output exits, the job continues: a write then returns an error.
	signal.Ignore(syscall.SIGPIPE)
	env := slurm.Env()
	if err := env.Ready(comm.Available()); err != nil {
		return refused(env, err)
	}
	timeout, fault := Timeout("auto")
	if fault != nil {
		timeout = defaultTimeout
	}
	if fault = cmp.Or(fault, o.Fault); env.Tasks <= 1 {
		if fault != nil {
			return Own(fault)
		}
		return startLocal(max(1, o.Ranks), timeout, body)
	}
	if o.Ranks > 0 && o.Ranks != env.Tasks {
		fault = status.Errorf(status.InvalidArgument, "--ranks %d: %s has started %d tasks; leave out --ranks", o.Ranks,
			env.Launcher, env.Tasks)
	}
	// A rank with a fault starts MPI all the same: the others, which may have none, would wait for
	// it until the timeout.
	world, err := startMPI(env, timeout, &o)
	if err != nil {
		return err
	}
	defer comm.Finalize()
	if err := env.Check(world.Size(), true); err != nil {
		return refused(env, err)
	}
	if err = comm.Agree(world, fault); err == nil {
		err, _ = body(Rank{World: world, OnNode: env.LocalSize, Local: env.LocalRank, Timeout: timeout,
			Late: func(string) {}})
	}
	limitEnd(world, timeout, err, &o)
	return err
}

// refused returns the error of tasks that cannot find each other. If the launcher's variables are
// left over from another job, this process prints it, whatever rank they say: rank 0 may not exist.
func refused(env slurm.Environment, err error) error {
	if !LeftOver(env) {
		return err
	}
	return Own(status.Errorf(status.Of(err),
		"%w\n%s=%d is set, but %s has not started this process; if another job has left it, run: unset %[2]s",
		err, env.SizeVariable(), env.Tasks, env.Launcher))
}

// longestEnd is how long MPI_Finalize may take after all ranks have come to it.
const longestEnd = 30 * time.Second

// limitEnd limits the time of MPI_Finalize, which the caller calls next, to longestEnd or the
// timeout. After this time it ends the process with the code of err, the result of the job; all
// files are written. MPICH under Slurm's PMI-2 sometimes waits in MPI_Finalize forever: one rank in
// a barrier of PMI, the other for a message of the first. Collective.
func limitEnd(world comm.Comm, timeout time.Duration, err error, o *Options) {
	// The time begins when all ranks are here: a process that ends without MPI_Finalize makes the
	// launcher end the other ranks.
	if timeout == 0 || world.Barrier() != nil {
		return
	}
	limit := min(timeout, longestEnd)
	time.AfterFunc(limit, func() {
		if err != nil {
			o.Print(err)
		}
		o.Warn(fmt.Sprintf(
			"launch: MPI_Finalize has not returned after %v; the process ends without it, which loses no result",
			limit))
		os.Exit(int(status.Of(err)))
	})
}

// leastStart is the least time that processes have to load and to start MPI, also if
// ULYSSES_TIMEOUT is shorter.
const leastStart = 20 * time.Second

// startMPI returns the communicator of all processes. If a process never starts MPI, for example
// because its command differs, MPI_Init waits forever; therefore startMPI warns, names the tasks
// that are missing, and ends this process after the timeout.
func startMPI(env slurm.Environment, timeout time.Duration, o *Options) (comm.Comm, error) {
	here := appear(env, o.Folder)
	defer here.leave()
	if timeout > 0 {
		timeout = max(timeout, leastStart)
	}
	defer time.AfterFunc(nameMissing, func() {
		if text := waiting(env, here, timeout); text != "" {
			o.Warn("launch: " + text)
		}
	}).Stop()
	if timeout > 0 {
		defer time.AfterFunc(timeout, func() {
			text := ""
			if ranks, _ := here.missing(); len(ranks) > 0 {
				text = " (" + here.describe(ranks) + ")"
			}
			o.Print(status.Errorf(status.Comm, "%s", notAll(env, timeout, text)))
			here.leave()
			os.Exit(int(status.Comm))
		}).Stop()
	}
	return comm.World()
}

// startLocal runs goroutine ranks in this process. A goroutine that never returns cannot be ended:
// startLocal returns without it, and it ends with the process.
func startLocal(n int, timeout time.Duration, body func(Rank) (err error, alone bool)) error {
	agreed, done := make([]error, n), make(chan error, 1)
	late := make(chan string, n)
	go func() {
		done <- comm.RunLocal(n, func(c comm.Comm) error {
			err, alone := body(Rank{World: c, OnNode: n, Local: c.Rank(), Timeout: timeout,
				Late: func(text string) { late <- text }})
			if alone {
				return err
			}
			agreed[c.Rank()] = err
			return nil
		})
	}()
	var err error
	select {
	case err = <-done:
	case text := <-late:
		select {
		case err = <-done:
		case <-time.After(time.Second):
			err = status.Errorf(status.Comm, "%s", text)
		}
	}
	if err != nil {
		return err
	}
	return agreed[0]
}

const defaultTimeout = 10 * time.Minute

// Timeout returns how long a collective may take before the job ends: ULYSSES_TIMEOUT, otherwise
// word, a duration, "off" for no limit (0), or "auto" for ten minutes.
func Timeout(word string) (time.Duration, error) {
	name := "parallel.timeout"
	if text := os.Getenv("ULYSSES_TIMEOUT"); text != "" {
		name, word = "ULYSSES_TIMEOUT", text
	}
	switch word {
	case "auto":
		return defaultTimeout, nil
	case "off":
		return 0, nil
	}
	d, err := time.ParseDuration(word)
	if err != nil || d < 0 {
		return 0, status.Errorf(status.InvalidArgument, "%s=%s: not a duration; set for example 90s, or 0 for no limit",
			name, word)
	}
	return d, nil
}
