package job

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"ulysses/slurm"
	"ulysses/tensor"
)

// signals handles SIGUSR1, SIGINT, SIGTERM, SIGHUP and SIGQUIT. It is created before MPI starts, so
// no signal is lost. At the first signal a training job stops with a checkpoint at the end of the
// current step; a second SIGINT or SIGTERM ends the process at once. A job that writes no
// checkpoint ends at the first signal. A process ends through end, which leaves no partly written
// file.
type signals struct {
	asked  atomic.Bool // stop after the current step
	edge   atomic.Bool // a step has ended since, or no step follows: the rest has no time limit
	verb   string
	stderr io.Writer
	heard  chan os.Signal

	mu      sync.Mutex
	first   os.Signal // the first signal that ends a process
	at      time.Time
	gentle  bool              // the process waits for the end of a step
	over    bool              // all steps are done
	say     func(text string) // log of this process's first rank; nil = not yet set
	peers   peerWatch         // of an MPI rank; nil if there are no other processes
	where   func(os.Signal)   // an MPI rank prints the call in which it waits
	last    func()            // called before the process ends; nil = nothing to do
	longest atomic.Int64      // nanoseconds of the longest step
}

// peerWatch is the part of comm.Watch that signals uses.
type peerWatch interface{ Waiting() time.Duration }

// sameMoment is the time within which two signals count as one: timeout(1) and srun send a signal
// to the process and to its group.
const sameMoment = 200 * time.Millisecond

// At a signal that ends processes, a rank whose current call has taken stalled prints the call, and
// ends after deadPeer. A launcher also sends SIGTERM to the peers of a dead rank, which would
// otherwise wait for that rank.
const (
	stalled  = 300 * time.Millisecond
	deadPeer = 10 * time.Second
)

// catchSignals starts to catch signals. Signals that the parent process ignores, as nohup does and
// shells do for background jobs, stay ignored.
func catchSignals(verb string, stderr io.Writer) *signals {
	x := &signals{verb: verb, stderr: stderr, gentle: verb == "run", heard: make(chan os.Signal, 8)}
	for _, s := range []os.Signal{syscall.SIGUSR1, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		if !signal.Ignored(s) {
			signal.Notify(x.heard, s)
		}
	}
	go func() {
		for s := range x.heard {
			x.hear(s)
		}
	}()
	return x
}

// release stops catching signals at the end of a job whose process continues, as in tests.
func (x *signals) release() {
	signal.Stop(x.heard)
	close(x.heard)
}

func (x *signals) hear(s os.Signal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	ends := s != syscall.SIGUSR1
	switch {
	case s == syscall.SIGQUIT: // print all stacks and exit at once
		stacks := make([]byte, 1<<20)
		fmt.Fprintf(x.stderr, "%s\n", stacks[:runtime.Stack(stacks, true)])
		x.end(s)
	case ends && x.first != nil && time.Since(x.at) < sameMoment:
		return
	case !ends && !x.gentle: // there is no checkpoint to write
		return
	case ends && (x.first != nil || !x.gentle):
		x.end(s)
	}
	if again := x.asked.Swap(true); ends || !again {
		x.tell(s)
	}
	if ends {
		x.first, x.at = s, time.Now()
		go x.mind(s)
	}
}

// tell logs on the first rank what the process does about a signal. The caller holds x.mu.
func (x *signals) tell(s os.Signal) {
	if x.say == nil {
		return
	}
	text := signalName(s) + ": the run stops after the step under way and writes a checkpoint"
	if x.over {
		text = signalName(s) + ": the steps are done and the run is about to end"
	}
	if s != syscall.SIGUSR1 {
		text += "; another " + signalName(s) + " ends it at once"
		if env := slurm.Env(); s == syscall.SIGTERM && env.Launcher == openMPI {
			text += ". mpirun kills its processes 1 s after SIGTERM unless it was started with --mca odls_base_sigkill_timeout SECONDS; SIGUSR1 to mpirun has no such limit"
		}
	}
	x.say(text)
}

const openMPI = "mpirun (Open MPI)"

// enter sets, for an MPI rank, the function that prints its position and the watch of its peers.
func (x *signals) enter(e *Env, rank int, host string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.peers = e.Watch
	x.where = func(s os.Signal) { e.Log.Error().Msgf("rank %d on %s: %v: %s", rank, host, s, e.Watch.InFlight()) }
}

// start is called when the job file has been read, with the log of this process's first rank. A job
// that writes no checkpoint ends at the first signal, also at one that came before start.
func (x *signals) start(e *Env, rank int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stderr = e.Stderr
	if x.gentle = x.gentle && e.Job.Kind == "train"; !x.gentle {
		if x.first != nil {
			x.end(x.first)
		}
		return
	}
	if rank > 0 {
		return
	}
	x.say = func(text string) { e.Log.Warn().Msg(text) }
	if x.first != nil {
		x.tell(x.first)
	} else if x.asked.Load() {
		x.tell(syscall.SIGUSR1)
	}
}

// locked runs a function that the end of the process must not interrupt, such as drawing on the
// terminal. Once the process ends, locked does not return.
func (x *signals) locked(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	do()
}

// atEnd sets the function that is called before a signal ends the process.
func (x *signals) atEnd(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.last = do
}

// done marks that no step follows.
func (x *signals) done() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.over = true
	x.edge.Store(true)
}

// step is called at the end of each step with the duration of the longest step, because a call may
// wait that long while peers compute. It reports whether the run is to stop.
func (x *signals) step(longest time.Duration) bool {
	x.longest.Store(int64(longest))
	if !x.asked.Load() {
		return false
	}
	x.edge.Store(true)
	return true
}

// mind watches an MPI rank that was told to stop and whose peers may be dead: its current step
// would never end.
func (x *signals) mind(s os.Signal) {
	x.mu.Lock()
	peers := x.peers
	x.mu.Unlock()
	if peers == nil {
		return
	}
	time.Sleep(stalled)
	said := false
	for ; !x.edge.Load(); time.Sleep(stalled / 3) {
		waits := peers.Waiting()
		if waits < stalled {
			continue
		}
		x.mu.Lock()
		if !said && !x.edge.Load() {
			said = true
			x.where(s)
		}
		if waits > max(deadPeer, 2*time.Duration(x.longest.Load())) && time.Since(x.at) > deadPeer && !x.edge.Load() {
			x.end(s)
		}
		x.mu.Unlock()
	}
}

// end ends the process with the exit code that shells use for a signal. The caller holds x.mu.
func (x *signals) end(s os.Signal) {
	tensor.RemoveUnfinished()
	if x.last != nil {
		x.last()
	}
	if x.where != nil {
		x.where(s)
	}
	if env := slurm.Env(); env.Rank == 0 {
		rest := "; it leaves no half-written file"
		if x.gentle {
			rest = "; the last checkpoint that was written is whole"
		}
		fmt.Fprintf(x.stderr, "ulysses-mpi: %s: %s ended at once%s\n", signalName(s), x.verb, rest)
	}
	os.Exit(128 + int(s.(syscall.Signal)))
}

// signalName returns "SIGINT" for syscall.SIGINT, whose own text is "interrupt".
func signalName(s os.Signal) string {
	switch s {
	case syscall.SIGUSR1:
		return "SIGUSR1"
	case syscall.SIGINT:
		return "SIGINT"
	case syscall.SIGTERM:
		return "SIGTERM"
	case syscall.SIGHUP:
		return "SIGHUP"
	case syscall.SIGQUIT:
		return "SIGQUIT"
	}
	return strings.ToUpper(s.String())
}
