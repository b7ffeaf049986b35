// Package job runs jobs and is the command line of the program.
//
// Main parses the arguments and runs a verb. Run starts the ranks (job/launch) and, on each rank,
// opens an Env: the job file (job/file), the device and the mesh of communicators. Then it runs the
// kind of job that the file names: a session trains or evaluates and writes a report (job/report);
// an operator job computes attention or the gated delta rule (job/operator). Verify runs the same
// code on one rank and on all ranks, and compares the results.
package job

import (
	"bytes"
	"io"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/internal/flight"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/slurm"
	"ulysses/train"
)

// Options are the arguments of the command line.
type Options struct {
	Path   string   // of the job file
	Sets   []string // table.key=value
	Ranks  int      // goroutine ranks in this process; 0 = one, or what the launcher started
	Stdout io.Writer
	Stderr io.Writer

	Verbose bool   // print every table
	Quiet   bool   // print warnings, errors and one line of results
	log     string // form of the log, one of logForms; "" = auto

	signals *launch.Signals
	verb    string   // the action on the job file
	args    []string // the whole command line, with the program; empty if there is none
	words   []string // the words after the verb
	text    string   // text that is printed instead of running a verb
	fault   error    // of this rank, from before the ranks start

	search   bool            // of a plan: every mesh
	cluster  string          // of a plan: a file that describes another machine; of doctor: the job file
	tensors  string          // of verify: the file that gets the tensors of all ranks
	json     bool            // of verify: print its findings as JSON
	all      bool            // of verify: print every tensor
	compare  string          // of logits: another folder
	logits   bool            // of logits: also the logits of each token
	output   string          // of init and sbatch: the file to write
	generate generateOptions // of generate
	// of sbatch
	sbatch    sbatchOptions
	outputSet bool // --output is given

	restarts int      // of supervise
	launcher []string // of supervise: the words after --
	force    bool     // of run and export: overwrite existing results
	merge    bool     // of export: add adapters to the base model
	open     opener   // of device and communicator; nil = backends
}

// Run runs the job on all ranks that were started and returns the error of this process. If the job
// is refused, all ranks return the same code. A rank that fails alone prints its name and the error
// on Stderr and ends the whole job.
func Run(o Options) error {
	o.verb = "run"
	if o.force {
		o.Sets = append(slices.Clone(o.Sets), "output.overwrite=true")
	}
	return onRanks(o, runKind)
}

func runKind(e *Env) error {
	if !e.Job.IsModelJob() {
		return runOperator(e)
	}
	return runTrain(e)
}

// onRanks runs body once for each rank of this process, with the job open.
func onRanks(o Options, body func(*Env) error) error {
	if o.signals == nil {
		o.signals = launch.CatchSignals(o.verb, o.Stderr)
		defer o.signals.Release()
	}
	start := launch.Options{Ranks: o.Ranks, Print: o.complain, Folder: o.sharedFolder(), Warn: o.warn, Fault: o.fault}
	return launch.Start(start, func(r launch.Rank) (error, bool) { return runRank(r, o, body) })
}

// sharedFolder returns output.dir of a training job that a launcher has started; "" for other jobs,
// and if this rank cannot read the job file on its own.
func (o *Options) sharedFolder() string {
	if slurm.Env().Tasks < 2 || o.Path == "" || o.fault != nil {
		return ""
	}
	src, err := file.Read(o.Path)
	if err != nil {
		return ""
	}
	j, err := file.Parse(src, o.Path, o.Sets, os.LookupEnv)
	if err != nil || j.Kind != "train" {
		return ""
	}
	return j.Output.Dir
}

// runRank opens the job on one rank and runs body. All ranks agree on an error from before the
// collectives of body, and return the same code. After that an error may be of one rank alone
// (alone = true): its peers may wait for it in a collective, so runRank aborts the job.
func runRank(r launch.Rank, o Options, body func(*Env) error) (err error, alone bool) {
	if o.signals == nil {
		o.signals = new(launch.Signals) // no signal is caught
	}
	host, _ := os.Hostname()
	rank, processes := r.World.Rank(), r.World.Kind() != "local"
	e := &Env{began: time.Now(), signals: o.signals, args: o.args, sets: o.Sets, world: r.World, timeout: r.Timeout,
		Clock: clock.New(), Ledger: comm.NewLedger(), Stderr: &screen{to: o.Stderr}, warned: &warned{},
		flight: flight.New(rank, r.World.Size(), host),
		isLate: new(atomic.Bool)}
	e.Log = o.logger(e.Stderr, rank, host).Hook(e.warned)
	tables := e.printTo(&o)
	e.Watch = comm.NewWatch(r.Timeout, host, func(text string) { e.late(text, r) })
	e.Watch.Record(e.flight)
	defer e.Watch.Close()
	if processes {
		e.signals.WatchPeers(e.Watch, func(text string) { e.Log.Error().Msgf("rank %d on %s: %s", rank, host, text) })
	}
	defer func() {
		if p := recover(); p != nil {
			err = status.Errorf(status.Internal, "panic: %v\n%s", p, stack())
			e.alone = true
		}
		e.endFlight(err)
		if err != nil && e.alone {
			err = status.Errorf(status.Of(err), "rank %d on %s failed: %w%s", rank, host, err, e.culprits(err))
			// goroutine ranks leave printing to the caller; a launcher passes on only the exit code
			if processes {
				e.Log.Error().Msg(err.Error())
			}
			r.World.Abort(status.Of(err), err.Error())
		}
		alone = e.alone
	}()
	if err := e.open(r, o); err != nil {
		return err, false
	}
	defer e.Device.Close()
	if rank == 0 || processes {
		var log func(text string)
		if rank == 0 {
			log = func(text string) { e.Log.Warn().Msg(text) }
		}
		e.signals.Begin(e.Job.Kind == "train", e.Stderr, log)
	}
	if err = body(e); err == nil {
		err = e.leave(nil)
	}
	if err == nil {
		err = written(0, tables.err)
	}
	return err, false
}

// printer writes tables and keeps the first error of writing. The error does not end the run, which
// rank 0 alone would leave while its peers continue; the run returns it at its end.
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
		e.Stdout, e.bar = p, hasBar(o.Stderr) && o.log != "json"
	}
	if o.Verbose {
		e.Details = p
	}
	return p
}

// inStep runs the loop of steps. An error in it is of this rank alone unless train.Shared reports
// that all ranks have it. A rank whose step takes too long logs this itself.
func (e *Env) inStep(loop func() error) error {
	e.alone = true
	e.Watch.LimitIdle(e.nearlyLate)
	err := loop()
	e.Watch.LimitIdle(nil)
	e.alone = err != nil && !train.Shared(err)
	return err
}

// readOnRoot returns the job file as rank 0 reads it, on all ranks. A rank that has another file of
// that name is refused: then the program or the data may be old there as well. Collective.
func readOnRoot(world comm.Comm, path string) ([]byte, error) {
	src, err := fileOfRoot(world, path)
	if err != nil {
		return nil, err
	}
	if own, fault := file.Read(path); fault == nil && !bytes.Equal(own, src) {
		host, _ := os.Hostname()
		err = status.Errorf(status.InvalidConfig,
			"%s: rank %d on host %s has another file than rank 0; copy it to every node, or remove it there", path,
			world.Rank(), host)
	}
	return src, comm.Agree(world, err)
}

// fileOfRoot returns the job file as rank 0 reads it, on all ranks. Collective.
func fileOfRoot(world comm.Comm, path string) (src []byte, err error) {
	if world.Rank() == 0 {
		src, err = file.Read(path)
	}
	if err := comm.Agree(world, err); err != nil {
		return nil, err
	}
	return comm.BroadcastBytes(world, src, 0)
}

func stack() string {
	b := make([]byte, 8<<10)
	return string(b[:runtime.Stack(b, false)])
}
