// Package job runs a job: it starts the ranks, parses the job file, opens devices and
// communicators, runs the kind of job that the file names, and reports.
package job

import (
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/slurm"
	"ulysses/train"
)

// Options is what the command line says.
type Options struct {
	Path   string   // of the job file
	Sets   []string // table.key=value
	Ranks  int      // goroutine ranks in this process; 0 = one, or what the launcher started
	Stdout io.Writer
	Stderr io.Writer

	Verbose bool   // print every table
	Quiet   bool   // print warnings, errors and one line of results
	log     string // form of the log, one of logForms; "" = auto

	signals *signals
	limit   time.Duration     // time limit of a collective; set by launch
	late    func(text string) // called when the watch treats a peer as dead
	verb    string            // the action on the job file
	args    []string          // the whole command line, with the program; empty if there is none
	words   []string          // the words after the verb
	text    string            // text that is printed instead of running a verb

	search  bool   // of a plan: every mesh
	cluster string // of a plan: a file that describes another machine
	json    bool   // of verify: print its findings as JSON
	all     bool   // of verify: print every tensor
	output  string // of init: the file to write
	force   bool   // of run and export: overwrite existing results
	open    opener // of device and communicator; nil = backends
}

// Run runs the job on all ranks that were started and returns this process's outcome. Every rank of
// a job that was refused returns the same code. A rank that fails on its own names itself on Stderr
// and ends the whole job.
func Run(o Options) error {
	o.verb = "run"
	if o.force {
		o.Sets = append(slices.Clone(o.Sets), "output.overwrite=true")
	}
	return launch(o, runKind)
}

func runKind(e *Env) error {
	if !e.Job.IsModelJob() {
		return runOperator(e)
	}
	return runTrain(e)
}

// launch finds out how this process was started, and runs body once for each rank that lives in it.
func launch(o Options, body func(*Env) error) error {
	// a reader of standard output that has gone ends no run: see printer
	signal.Ignore(syscall.SIGPIPE)
	env := slurm.Env()
	if err := env.Ready(comm.Available()); err != nil {
		return err
	}
	if o.signals == nil {
		o.signals = catchSignals(o.verb, o.Stderr)
		defer o.signals.release()
	}
	var err error
	if o.limit, err = watchLimit(); err != nil {
		return unmet(err)
	}
	if env.Tasks <= 1 {
		return launchLocal(max(1, o.Ranks), o, body)
	}
	if o.Ranks > 0 && o.Ranks != env.Tasks {
		return unmet(status.Errorf(status.InvalidArgument, "--ranks %d under %s with %d tasks: leave --ranks out, the launcher decides", o.Ranks, env.Launcher, env.Tasks))
	}
	world, err := o.world(env)
	if err != nil {
		return err
	}
	defer comm.Finalize()
	if err := env.Check(world.Size(), true); err != nil {
		return err
	}
	err, _ = runRank(world, env.LocalSize, o, body)
	return err
}

// leastStart is how long processes may take to load and find one another, however short
// ULYSSES_TIMEOUT is.
const leastStart = 20 * time.Second

// world is the communicator of all processes. Where one of them never joins, because it was started
// to do something else, MPI waits for ever.
func (o *Options) world(env slurm.Environment) (comm.Comm, error) {
	if limit := max(o.limit, leastStart); o.limit > 0 {
		defer time.AfterFunc(limit, func() {
			o.complain(status.Errorf(status.Comm, "rank %d has waited %v for all %d tasks of %s to start MPI: start the same command on each of them",
				env.Rank, limit, env.Tasks, env.Launcher))
			os.Exit(int(status.Comm))
		}).Stop()
	}
	return comm.World()
}

// launchLocal runs goroutine ranks in this process. A goroutine that is late for ever cannot be
// ended: it is left behind, and the process ends without it.
func launchLocal(n int, o Options, body func(*Env) error) error {
	agreed, done := make([]error, n), make(chan error, 1)
	late := make(chan string, n)
	o.late = func(text string) { late <- text }
	go func() {
		done <- comm.RunLocal(n, func(c comm.Comm) error {
			err, alone := runRank(c, n, o, body)
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

// runRank is one rank's life. Whatever fails before the body's collectives is agreed on, so that
// all ranks return the same code; after that a failing rank is alone with its error, while its
// peers sit in a collective, and must end the job itself.
func runRank(world comm.Comm, ranksOnNode int, o Options, body func(*Env) error) (err error, alone bool) {
	if o.signals == nil {
		o.signals = new(signals) // no signal is caught
	}
	host, _ := os.Hostname()
	e := &Env{began: time.Now(), signals: o.signals, args: o.args, sets: o.Sets, world: world, Clock: clock.New(), Ledger: comm.NewLedger(), Stderr: &screen{to: o.Stderr}}
	e.warned = &warned{}
	e.Log = o.logger(e.Stderr, world.Rank(), host).Hook(e.warned)
	tables := e.printTo(&o)
	e.Watch = comm.NewWatch(o.limit, host, func(late string) {
		e.Log.Error().Msg(late)
		world.Abort(status.Comm, late)
		if o.late != nil {
			o.late(late)
		}
	})
	defer e.Watch.Close()
	if world.Kind() != "local" {
		e.signals.enter(e, world.Rank(), host)
	}
	defer func() {
		if p := recover(); p != nil {
			err = status.Errorf(status.Internal, "panic: %v\n%s", p, stack())
			e.alone = true
		}
		if err != nil && e.alone {
			err = status.Errorf(status.Of(err), "rank %d on %s failed: %w", world.Rank(), host, err)
			// RunLocal's caller prints; here the launcher would hide all but the code
			if world.Kind() != "local" {
				e.Log.Error().Msg(err.Error())
			}
			world.Abort(status.Of(err), err.Error())
		}
		alone = e.alone
	}()
	if err := e.open(world, ranksOnNode, o); err != nil {
		return err, false
	}
	defer e.Device.Close()
	if world.Rank() == 0 || world.Kind() != "local" {
		e.signals.start(e, world.Rank())
	}
	if err = body(e); err == nil {
		err = e.leave(nil)
	}
	if err == nil {
		err = written(0, tables.err)
	}
	return err, false
}

// printer writes tables. One that cannot be printed ends no run, least of all on rank 0 alone while
// its peers go on: the run says so at its end.
type printer struct {
	to  io.Writer
	err error
}

func (p *printer) Write(text []byte) (int, error) {
	if p.err == nil {
		_, p.err = io.WriteString(p.to, file.WithoutLogins(string(text)))
	}
	return len(text), nil
}

// printTo sets the writers of rank 0, by --quiet and --verbose. The other ranks print nothing.
func (e *Env) printTo(o *Options) *printer {
	p := &printer{to: io.Discard}
	e.Stdout, e.Details, e.Result, e.quiet = io.Discard, io.Discard, p, o.Quiet
	if e.world.Rank() > 0 {
		return p
	}
	if p.to = o.Stdout; !o.Quiet {
		e.Stdout, e.bar = p, isTerminal(o.Stderr) && o.log != "json"
	}
	if o.Verbose {
		e.Details = p
	}
	return p
}

// inStep runs a loop in which ranks move in step: a rank that fails there is alone with its error,
// unless all share it, and one that is late says so itself.
func (e *Env) inStep(loop func() error) error {
	e.alone = true
	e.Watch.LimitIdle(func(slow string) { e.Log.Error().Msg(slow) })
	err := loop()
	e.Watch.LimitIdle(nil)
	e.alone = err != nil && !train.Shared(err)
	return err
}

// readOnRoot is the job file as rank 0 sees it.
func readOnRoot(world comm.Comm, path string) ([]byte, error) {
	var src []byte
	var err error
	if world.Rank() == 0 {
		src, err = file.Read(path)
	}
	if err := comm.Agree(world, err); err != nil {
		return nil, err
	}
	return comm.BroadcastBytes(world, src, 0)
}

// watchLimit is how long a collective may take before the job is ended: ULYSSES_TIMEOUT, else ten
// minutes.
func watchLimit() (time.Duration, error) {
	text := os.Getenv("ULYSSES_TIMEOUT")
	if text == "" {
		return 10 * time.Minute, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, status.Errorf(status.InvalidArgument, "ULYSSES_TIMEOUT=%s: a duration such as 90s is needed, or 0 for no limit", text)
	}
	return d, nil
}

func stack() string {
	b := make([]byte, 8<<10)
	return string(b[:runtime.Stack(b, false)])
}
