package launch

import (
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
// "auto" (the end of the Slurm job) or a duration.
func NewStopper(limit string, signals *Signals, start time.Time) (*Stopper, error) {
	x := &Stopper{signals: signals, start: start, last: time.Now()}
	switch limit {
	case "off":
	case "auto":
		x.end = slurm.Env().End
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
