package launch

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"ulysses/comm"
	"ulysses/slurm"
	"ulysses/tensor"
)

// Signals handles SIGUSR1, SIGINT, SIGTERM, SIGHUP and SIGQUIT of this process. It is created
// before MPI starts, so no signal is lost after main has begun; before, the first signal ends the
// process. At the first signal a training job stops with a checkpoint at the end of the current
// step; a second SIGINT or SIGTERM ends the process at once. A job that writes no checkpoint ends
// at the first signal. Before the process ends, partly written files are removed. The zero value
// catches no signal.
type Signals struct {
	stop     atomic.Bool            // the run must stop after the current step
	why      atomic.Pointer[string] // the name of the signal that has set stop
	stepDone atomic.Bool            // a step has ended since the signal, or no step follows
	verb     string
	stderr   io.Writer
	caught   chan os.Signal

	mu      sync.Mutex
	first   os.Signal // the first signal that ends a process
	at      time.Time // time of first
	waits   bool      // the process ends only after the current step, with a checkpoint
	over    bool      // all steps are done
	saved   bool      // the run has stopped, and its checkpoint is complete
	log     func(text string)
	peers   peerWatch       // of an MPI rank; nil if there are no other processes
	where   func(os.Signal) // an MPI rank prints the call in which it waits
	last    func()          // called before the process ends; nil = nothing to do
	onEnd   []func()        // called at the first signal that ends a process
	blame   func()          // prints the rank that is dead, if one is
	longest atomic.Int64    // nanoseconds of the longest step
}

// peerWatch is the method of comm.Watch that Signals uses: the duration of the current call.
type peerWatch interface{ Waiting() time.Duration }

// sameMoment is the time within which two signals count as one: timeout(1) and srun send a signal
// to the process and to its group.
const sameMoment = 200 * time.Millisecond

// After a signal that ends processes, a rank prints its current call once the call has taken
// stalled, and ends once it has taken deadPeer.
const (
	stalled  = 300 * time.Millisecond
	deadPeer = 10 * time.Second
)

// blameAfter are the times after a signal at which a rank looks for a dead rank in the records. A
// launcher also sends SIGTERM to the peers of a dead rank, which would otherwise wait for it, and
// then kills them: mpirun of Open MPI 4 after 1 s; mpirun of Open MPI 5, whose SIGTERM comes 0.27 s
// after the death, after 0.24 s. Before a rank has been silent for some time, the records do not
// show that it is dead (package flight).
var blameAfter = []time.Duration{120 * time.Millisecond, 450 * time.Millisecond, 750 * time.Millisecond}

// CatchSignals starts to catch signals. Signals that the parent process ignores, as with nohup or
// in a background job of a shell, stay ignored.
func CatchSignals(verb string, stderr io.Writer) *Signals {
	x := &Signals{verb: verb, stderr: stderr, waits: verb == "run", caught: make(chan os.Signal, 8)}
	for _, s := range Caught() {
		signal.Notify(x.caught, s)
	}
	go func() {
		for s := range x.caught {
			x.handle(s)
		}
	}()
	return x
}

// Caught returns the signals to catch: those that Signals handles, without those that the parent
// process ignores.
func Caught() []os.Signal {
	all := []os.Signal{syscall.SIGUSR1, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}
	return slices.DeleteFunc(all, signal.Ignored)
}

// Release stops catching signals at the end of a job whose process continues, as in tests.
func (x *Signals) Release() {
	signal.Stop(x.caught)
	close(x.caught)
}

func (x *Signals) handle(s os.Signal) {
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
	case s == syscall.SIGTERM && x.saved: // with srun --kill-on-bad-exit, when another rank has left
		return
	case !ends && !x.waits: // there is no checkpoint to write
		return
	case ends && (x.first != nil || !x.waits):
		x.end(s)
	}
	name := signalName(s)
	x.why.CompareAndSwap(nil, &name)
	if again := x.stop.Swap(true); ends || !again {
		x.announce(s)
	}
	if ends {
		x.first, x.at = s, time.Now()
		for _, do := range x.onEnd {
			do()
		}
		go x.watchPeers(s)
	}
}

// announce logs on the first rank how the run reacts to a signal. The caller holds x.mu.
func (x *Signals) announce(s os.Signal) {
	if x.log == nil {
		return
	}
	text := signalName(s) + ": the run stops after the current step and writes a checkpoint"
	if x.over {
		text = signalName(s) + ": all steps are done, the run is about to end"
	}
	if s != syscall.SIGUSR1 {
		text += "; another " + signalName(s) + " ends it at once"
		if env := slurm.Env(); s == syscall.SIGTERM && env.Launcher == openMPI {
			until := "1 s after SIGTERM unless it was started with --mca odls_base_sigkill_timeout SECONDS"
			if os.Getenv("PRTE_LAUNCHED") != "" {
				until = "0.25 s after SIGTERM (Open MPI 5)"
			}
			text += ". mpirun kills its processes " + until + "; SIGUSR1 to mpirun has no such limit"
		}
	}
	x.log(text)
}

const openMPI = "mpirun (Open MPI)"

// WatchPeers sets, for an MPI rank, the watch of its calls and the function that prints a signal
// beside the current call.
func (x *Signals) WatchPeers(w *comm.Watch, print func(text string)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.peers = w
	x.where = func(s os.Signal) { print(fmt.Sprintf("%v: %s", s, w.InFlight())) }
}

// Begin is called when the job file has been read. checkpoints says that the job writes checkpoints
// when it stops; otherwise the process ends at the first signal, also at one that came before
// Begin. log is the log of the first rank; nil on other ranks.
func (x *Signals) Begin(checkpoints bool, stderr io.Writer, log func(text string)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stderr = stderr
	if x.waits = x.waits && checkpoints; !x.waits {
		if x.first != nil {
			x.end(x.first)
		}
		return
	}
	if x.log = log; log == nil {
		return
	}
	if x.first != nil {
		x.announce(x.first)
	} else if x.stop.Load() {
		x.announce(syscall.SIGUSR1)
	}
}

// Locked runs a function that the end of the process must not interrupt, such as drawing on the
// terminal. Once the process ends, Locked does not return.
func (x *Signals) Locked(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	do()
}

// AtEnd sets the function that is called before a signal ends the process. The function must not
// call Locked.
func (x *Signals) AtEnd(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.last = do
}

// Blame sets the function that is called when a call does not return after a signal that ends
// processes. It prints the rank that is dead, if one is.
func (x *Signals) Blame(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.blame = do
}

// OnEnd adds a function that is called at the first signal that ends a process, at once if it has
// come. The function must not call a method of x.
func (x *Signals) OnEnd(do func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.onEnd = append(x.onEnd, do); x.first != nil {
		do()
	}
}

// Done marks that no step follows.
func (x *Signals) Done() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.over = true
	x.stepDone.Store(true)
}

// Saved marks that the run has stopped and that its checkpoint is complete. From now on SIGTERM is
// ignored, because the process is about to end: Slurm sends SIGTERM to the remaining ranks when the
// first one has left with code 75, and the job must keep this code.
func (x *Signals) Saved() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.saved = true
}

// Step is called at the end of each step with the duration of the longest step, because a call may
// wait that long while peers compute. It reports whether the run must stop.
func (x *Signals) Step(longest time.Duration) bool {
	x.longest.Store(int64(longest))
	if !x.stop.Load() {
		return false
	}
	x.stepDone.Store(true)
	return true
}

// watchPeers ends an MPI rank whose peers seem to be dead after a signal: the current step would
// never end.
func (x *Signals) watchPeers(s os.Signal) {
	x.mu.Lock()
	peers, blame := x.peers, x.blame
	x.mu.Unlock()
	if peers == nil {
		return
	}
	time.Sleep(blameAfter[0])
	printed, looked := false, 0
	for ; !x.stepDone.Load(); time.Sleep(stalled / 3) {
		waits := peers.Waiting()
		if waits < stalled {
			continue
		}
		if blame != nil && looked < len(blameAfter) && time.Since(x.at) > blameAfter[looked] {
			blame()
			looked++
		}
		x.mu.Lock()
		if !printed && !x.stepDone.Load() {
			printed = true
			x.where(s)
		}
		if waits > max(deadPeer, 2*time.Duration(x.longest.Load())) && time.Since(x.at) > deadPeer &&
			!x.stepDone.Load() {
			x.end(s)
		}
		x.mu.Unlock()
	}
}

// end ends the process with the exit code that shells use for a signal. The caller holds x.mu.
func (x *Signals) end(s os.Signal) {
	tensor.RemoveUnfinished()
	if x.last != nil {
		x.last()
	}
	if x.where != nil {
		x.where(s)
	}
	if env := slurm.Env(); env.Rank == 0 {
		files := "no partly written file remains"
		if x.waits {
			files = "the last checkpoint is complete"
		}
		fmt.Fprintf(x.stderr, "ulysses-mpi: %s: %s ended at once; %s\n", signalName(s), x.verb, files)
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
