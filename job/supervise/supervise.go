// Package supervise runs a launcher (srun, mpirun) with a training job and watches the job from
// outside of its ranks: it ends a job whose ranks are all frozen, and starts a job again from its
// newest checkpoint after a rank has died, without a new wait in Slurm's queue.
//
// Run does both. Restarts use the nodes of the allocation that are still there (nodes.go).
package supervise

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"ulysses/internal/flight"
	"ulysses/internal/status"
)

// Options is a job under supervision.
type Options struct {
	Launcher []string // the launcher with its options
	Program  []string // the command of a rank
	Records  string   // folder of the flight recorder
	Restarts int      // how often the job is started again
	// Again returns where a restart continues, and options for the command of a rank that make it
	// continue there.
	Again func() (from string, options []string)
	// Fewer returns options for the command of a rank of an attempt with fewer ranks than the first
	// one: with now ranks instead of before; 0 = unknown.
	Fewer func(before, now int) []string
	// the job is ended if no rank shows a sign of life for so long, which every rank that runs does
	// all the time; 0 = never
	Timeout time.Duration
	Stdout  io.Writer
	Stderr  io.Writer
	Log     func(text string)
	Signals <-chan os.Signal // that came to this process
}

// Attempt is the environment variable with the number of restarts so far.
const Attempt = "ULYSSES_ATTEMPT"

// grace is how long a launcher may take to end its processes after SIGTERM, and poll is the
// interval at which the records are read. Tests shorten them.
var (
	grace = 15 * time.Second
	poll  = time.Second / 2
)

// sameMoment is the time within which two signals count as one: timeout(1) sends a signal to the
// process and to its group.
const sameMoment = 200 * time.Millisecond

// Run runs the job and returns its exit code: that of the last attempt, or status.Preempted if a
// signal came before the first or the next one. An error means that the launcher could not be
// started.
func Run(o Options) (code int, err error) {
	c, again := newCluster(), o
	for attempt := 0; ; attempt++ {
		words, program, err := c.command(&again)
		if err != nil {
			return 0, err
		}
		switch waiting := o.waiting(); {
		case waiting && attempt == 0:
			o.Log("a signal has come: the job is not started; run the same command again to start it")
			return int(status.Preempted), nil
		case waiting:
			o.Log("a signal has come: the job is not started again; run the same command again to resume it")
			return int(status.Preempted), nil
		}
		before, record := o.lastChange(), o.record()
		end, err := o.attempt(attempt, append(words, program...))
		switch {
		case err != nil:
			return 0, err
		case end.signalled || final(end.code) && end.code != 0:
			return end.code, nil
		}
		d := o.diagnosis(record, &end)
		if end.code == 0 {
			if d == nil || len(d.Ranks) == 0 {
				if end.frozen == "" && o.lastChange().Equal(before) {
					o.Log(fmt.Sprintf(
						"the launcher ended with exit code 0, but %s has not changed, as seen from here: the job has not run; check whether the launcher starts ranks: %s",
						filepath.Dir(o.Records), strings.Join(o.Launcher, " ")))
				}
				return 0, nil
			}
			// Only a run that has not come to its end leaves records. mpiexec of MPICH ends with 0
			// if a rank has exited with 0 and it has killed the others.
			end.code = int(status.Comm)
			o.Log(fmt.Sprintf(
				"the launcher ended with exit code 0, but the run has not finished; its exit code is taken as %d",
				end.code))
		}
		switch {
		case d == nil: // refused before the first step: a restart would be refused as well
			return end.code, nil
		case attempt == o.Restarts:
			if attempt > 0 {
				o.Log(fmt.Sprintf("the job ended with exit code %d: %s; no restart is left (--restarts %d)", end.code,
					firstLine(d.Text), o.Restarts))
			}
			return end.code, nil
		}
		c.exclude(d, !status.Code(end.code).Known())
		from, options := o.Again()
		again.Program = append(slices.Clone(o.Program), options...)
		o.Log(fmt.Sprintf("the job ended with exit code %d: %s; restart %d of %d from %s", end.code, firstLine(d.Text),
			attempt+1, o.Restarts, from))
	}
}

// waiting reports whether a signal has come before an attempt, and takes it. A launcher that has
// just been started has no handler yet, and would be killed by it.
func (o *Options) waiting() bool {
	select {
	case <-o.Signals:
		return true
	default:
		return false
	}
}

// lastChange returns when an entry of output.dir was last made or removed; the zero time if there
// is no such folder. A run makes and removes its owner file there, whatever else it does.
func (o *Options) lastChange() time.Time {
	dir := filepath.Dir(o.Records)
	_, _ = os.ReadDir(dir) // reading the folder makes NFS fetch it from the server
	info, err := os.Stat(dir)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// final reports whether a restart would not help: the job has ended well, has stopped with a
// checkpoint, or is refused, or its loss is NaN or Inf, which a restart would repeat.
func final(code int) bool {
	return slices.Contains([]status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory,
		status.Numeric, status.Preempted}, status.Code(code))
}

func firstLine(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	return text
}

// ending is how an attempt has ended.
type ending struct {
	code      int
	signalled bool // a signal to this process has ended it
	frozen    string
}

// record returns the file with the record of rank 0; nil if there is none.
func (o *Options) record() os.FileInfo {
	_, _ = os.ReadDir(o.Records) // reading the folder makes NFS fetch it from the server
	info, err := os.Stat(flight.File(o.Records, 0))
	if err != nil {
		return nil
	}
	return info
}

// diagnosis returns what the records say about an attempt, before which the file of rank 0 was
// before; nil if the attempt has left no records, and was not frozen. The time of a file is that of
// its server, whose clock may differ.
func (o *Options) diagnosis(before os.FileInfo, end *ending) *flight.Diagnosis {
	now := o.record()
	if now == nil || before != nil && os.SameFile(now, before) && now.ModTime().Equal(before.ModTime()) {
		if end.frozen != "" { // no refusal: the ranks have removed their records at the end of the run
			return &flight.Diagnosis{Text: end.frozen}
		}
		return nil
	}
	d, err := flight.Find(o.Records)
	if err != nil {
		d = &flight.Diagnosis{Text: err.Error()}
	}
	if end.frozen != "" {
		d.Text = end.frozen
	}
	return d
}

// attempt runs the launcher once.
func (o *Options) attempt(number int, words []string) (end ending, err error) {
	cmd := exec.Command(words[0], words[1:]...)
	// The launcher writes to this process: mpirun ends the job if its output has no reader.
	cmd.Stdout, cmd.Stderr = &outlet{to: o.Stdout}, &outlet{to: o.Stderr}
	cmd.Env = append(os.Environ(), Attempt+"="+strconv.Itoa(number))
	// In a group of its own: a Ctrl-C of the terminal comes to this process alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = grace
	if err := cmd.Start(); err != nil {
		return end, status.Errorf(status.InvalidArgument, "supervise: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	watch := heart{dir: o.Records, limit: o.Timeout, seen: time.Now(), began: time.Now()}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	group := -cmd.Process.Pid
	var kill <-chan time.Time
	var first time.Time // of the first signal
	for {
		select {
		case err := <-ended:
			end.code, err = codeOf(err)
			return end, err
		case s := <-o.Signals:
			// The launcher passes SIGUSR1 on to the ranks, which stop with a checkpoint. srun would
			// kill them after SIGTERM.
			send, again := syscall.SIGUSR1, end.signalled && s != syscall.SIGUSR1
			switch {
			case again && time.Since(first) < sameMoment:
				continue
			case again || s == syscall.SIGQUIT:
				send = syscall.SIGTERM
			}
			if !end.signalled {
				end.signalled, first = true, time.Now()
			}
			syscall.Kill(cmd.Process.Pid, send)
		case <-tick.C:
			if kill == nil && watch.frozen() {
				end.frozen = fmt.Sprintf(
					"no rank has shown a sign of life for %v: their processes are stopped, or their file system does not respond",
					o.Timeout)
				o.Log(end.frozen + "; the job is ended")
				syscall.Kill(group, syscall.SIGTERM)
				kill = time.After(grace)
			}
		case <-kill:
			syscall.Kill(group, syscall.SIGKILL)
		}
	}
}

// outlet passes output on. After an error, such as that of a pipe without a reader, it drops the
// rest.
type outlet struct {
	to     io.Writer
	closed bool
}

func (o *outlet) Write(text []byte) (int, error) {
	if !o.closed {
		_, err := o.to.Write(text)
		o.closed = err != nil
	}
	return len(text), nil
}

// codeOf returns the exit code of a process, as a shell does.
func codeOf(err error) (int, error) {
	var exit *exec.ExitError
	switch {
	case err == nil || errors.Is(err, exec.ErrWaitDelay):
		return 0, nil
	case !errors.As(err, &exit):
		return 0, status.Errorf(status.Internal, "supervise: %w", err)
	}
	if w, ok := exit.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal()), nil
	}
	return exit.ExitCode(), nil
}

// heart finds out whether the ranks show signs of life.
type heart struct {
	dir         string
	limit       time.Duration
	began, seen time.Time // of the attempt; of the last change
	last        int64     // sum of the times of the last signs of life
}

// frozen reports whether no rank has shown a sign of life for the limit. It reads nothing until the
// ranks have records.
func (h *heart) frozen() bool {
	if h.limit == 0 {
		return false
	}
	sum, ok := flight.Beats(h.dir, h.began)
	if !ok || sum != h.last {
		h.last, h.seen = sum, time.Now()
		return false
	}
	return time.Since(h.seen) > h.limit
}
