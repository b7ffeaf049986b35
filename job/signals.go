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

// signals is what this process does about SIGUSR1, SIGINT, SIGTERM, SIGHUP and SIGQUIT. It is made before MPI starts, so that none is lost. A training
// job stops at the end of the step under way, with a checkpoint, at the first of them; a second one of those that end a process ends it at
// once. What has no checkpoint to write ends at the first one. A process ends through end, which leaves no half-written file.
type signals struct {
	asked  atomic.Bool // to stop after the step under way
	edge   atomic.Bool // the end of a step has been reached since, or no step follows: what is left takes as long as it takes
	verb   string
	stderr io.Writer
	heard  chan os.Signal

	mu      sync.Mutex
	first   os.Signal // of those that end a process
	at      time.Time
	gentle  bool              // a step's end is waited for
	over    bool              // the steps are done
	say     func(text string) // of the first rank here; nil = too early
	peers   peerWatch         // of a rank of MPI; nil where there are no other processes
	where   func(os.Signal)   // a rank of MPI says where it is
	last    func()            // before the process ends; nil = nothing
	longest atomic.Int64      // nanoseconds of a step
}

// peerWatch is what is asked of comm.Watch.
type peerWatch interface{ Waiting() time.Duration }

// sameMoment is within which two signals are one: timeout(1) and srun send theirs to the process and to its group.
const sameMoment = 200 * time.Millisecond

// stalled is how long a call may be under way at a signal that ends processes before its rank says where it is, and deadPeer how long until
// the rank ends: a launcher sends SIGTERM to the peers of a rank that died too, and they would wait for that one.
const (
	stalled  = 300 * time.Millisecond
	deadPeer = 10 * time.Second
)

// catchSignals hears them from now on. What the parent process ignores, as nohup does and a shell for its background jobs, stays ignored.
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

// release is the end of a job whose process goes on, as in tests.
func (x *signals) release() {
	signal.Stop(x.heard)
	close(x.heard)
}

func (x *signals) hear(s os.Signal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	ends := s != syscall.SIGUSR1
	switch {
	case s == syscall.SIGQUIT: // where everything is, at once
		stacks := make([]byte, 1<<20)
		fmt.Fprintf(x.stderr, "%s\n", stacks[:runtime.Stack(stacks, true)])
		x.end(s)
	case ends && x.first != nil && time.Since(x.at) < sameMoment:
		return
	case !ends && !x.gentle: // nothing to write that would be lost
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

// tell says on the first rank what follows; x is locked.
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

// enter makes known a rank of MPI: where it is, and how long it waits for its peers.
func (x *signals) enter(e *Env, rank int, host string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.peers = e.Watch
	x.where = func(s os.Signal) { e.Log.Error().Msgf("rank %d on %s: %v: %s", rank, host, s, e.Watch.InFlight()) }
}

// start is called once the job file is read, with the first rank of this process: its log says what a signal does. What writes no checkpoint
// ends at the first signal, also at one that was heard before.
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

// locked does what must not meet the end of the process, such as drawing on the terminal. Once the process ends it does not return.
func (x *signals) locked(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	do()
}

// atEnd makes known what is left to do where a signal ends the process.
func (x *signals) atEnd(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.last = do
}

// done says that no step follows.
func (x *signals) done() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.over = true
	x.edge.Store(true)
}

// step is called at the end of each step, with what the longest took: a call for which peers compute may take as long. It reports whether the run
// is to stop.
func (x *signals) step(longest time.Duration) bool {
	x.longest.Store(int64(longest))
	if !x.asked.Load() {
		return false
	}
	x.edge.Store(true)
	return true
}

// mind looks after a rank of MPI that was told to stop and whose peers may be dead: its step has no end then.
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

// end ends the process with the code that a shell gives to a process that a signal has ended; x is locked.
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

// signalName is SIGINT for syscall.SIGINT, whose own text is "interrupt".
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
