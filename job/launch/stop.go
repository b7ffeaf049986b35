package launch

import (
	"fmt"
	"time"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// Stopper decides when a run writes a checkpoint and stops: after a signal, such as SIGUSR1, which
// Slurm sends before the time limit with sbatch --signal=USR1@120, or when the remaining time is
// shorter than two steps and a minute, or two steps and twice the longest checkpoint.
type Stopper struct {
	signals *Signals
	start   time.Time
	end     time.Time // zero = no limit
	last    time.Time // time of the previous call of Now; at first, the start of the steps
	longest time.Duration
	saving  time.Duration // of the longest checkpoint
	late    bool          // the time limit is near
}

// NewStopper returns the Stopper of a run that started at start. limit is train.time_limit: "off",
// "auto" (the end of the Slurm job) or a duration. An end of the Slurm job before start is not the
// current one, because the job's time limit was raised, or because another job has left the
// variable in the environment. Then the run has no limit, and warn is called.
func NewStopper(limit string, signals *Signals, start time.Time, warn func(text string)) (*Stopper, error) {
	x := &Stopper{signals: signals, start: start, last: time.Now()}
	switch limit {
	case "off":
	case "auto":
		if x.end = slurm.Env().End; !x.end.IsZero() && !x.end.After(start) {
			warn(fmt.Sprintf(
				"train.time_limit: SLURM_JOB_END_TIME=%d was %v before the start, so the run has no time limit; set for example train.time_limit = \"3h30m\"",
				x.end.Unix(), start.Sub(x.end).Round(time.Second)))
			x.end = time.Time{}
		}
	default:
		d, err := time.ParseDuration(limit)
		if err != nil {
			return nil, status.Errorf(status.Internal, "train.time_limit = %q: %w", limit, err)
		}
		x.end = start.Add(d)
	}
	return x, nil
}

// margin is the time for a checkpoint and the end of the job.
const margin = time.Minute

// Saved is called with the time that a checkpoint has taken.
func (x *Stopper) Saved(took time.Duration) { x.saving = max(x.saving, took) }

// Reason returns why this rank wanted the run to stop: the name of a signal, "time limit", or "" if
// it did not.
func (x *Stopper) Reason() string {
	if name := x.signals.why.Load(); name != nil {
		return *name
	}
	if x.late {
		return "time limit"
	}
	return ""
}

// Now reports whether the run must stop. It must be called after each step, once.
func (x *Stopper) Now() bool {
	t := time.Now()
	x.longest = max(x.longest, t.Sub(x.last))
	x.last = t
	spare := max(min(margin, x.end.Sub(x.start)/10), 2*x.saving)
	x.late = !x.end.IsZero() && t.Add(2*x.longest+spare).After(x.end)
	return x.signals.Step(x.longest) || x.late
}
