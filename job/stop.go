package job

import (
	"time"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/slurm"
)

// stopper decides when a run writes a checkpoint and ends: at a signal, such as SIGUSR1, which
// Slurm sends before the time limit with sbatch --signal=USR1@120, or when less time is left than
// two steps and a minute.
type stopper struct {
	signals *signals
	start   time.Time
	end     time.Time // zero = no limit
	last    time.Time // time of the previous call of now; at first, the start of the steps
	longest time.Duration
}

func newStopper(j *file.Job, heard *signals, start time.Time) (*stopper, error) {
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

// margin is the time for a checkpoint and the job's end.
const margin = time.Minute

// now is called after every step.
func (x *stopper) now() bool {
	t := time.Now()
	x.longest = max(x.longest, t.Sub(x.last))
	x.last = t
	spare := min(margin, x.end.Sub(x.start)/10)
	return x.signals.step(x.longest) || !x.end.IsZero() && t.Add(2*x.longest+spare).After(x.end)
}
