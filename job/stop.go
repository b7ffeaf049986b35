package job

import (
	"time"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// stopper says when a run should write a checkpoint and end: at a signal, such as the SIGUSR1 that Slurm sends ahead of the end when asked to
// (sbatch --signal=USR1@120), or when the time left is less than what two steps and a minute take.
type stopper struct {
	signals *signals
	start   time.Time
	end     time.Time // zero = no limit
	last    time.Time // when it was asked before; at first, when the steps began
	longest time.Duration
}

func newStopper(j *Job, heard *signals, start time.Time) (*stopper, error) {
	x := &stopper{signals: heard, start: start, last: time.Now()}
	switch limit := j.Train.TimeLimit; limit {
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

// margin is what a checkpoint and the job's end may take.
const margin = time.Minute

// now is asked after every step.
func (x *stopper) now() bool {
	t := time.Now()
	x.longest = max(x.longest, t.Sub(x.last))
	x.last = t
	spare := min(margin, x.end.Sub(x.start)/10)
	return x.signals.step(x.longest) || !x.end.IsZero() && t.Add(2*x.longest+spare).After(x.end)
}
