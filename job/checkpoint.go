package job

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/train"
)

// checkpoints is where the run keeps its states and what one that resumes must have in common with it.
func (s *session) checkpoints() *train.Checkpoints {
	j := s.Job
	base := j.Model.Path
	if abs, err := filepath.Abs(base); base != "" && err == nil {
		base = abs
	}
	rest := func(dir string) error { return s.model.SaveRest(dir, j.Model.Path) }
	return &train.Checkpoints{Dir: j.checkpointDir(), Every: j.Checkpoint.Every, Keep: j.Checkpoint.Keep, Model: rest, Base: base, Accept: j.Checkpoint.Accept, Run: map[string]string{
		"model":          digest(s.config),
		"optimizer.name": j.Optimizer.Name,
		"global batch":   fmt.Sprint(j.Mesh.GlobalBatch),
		"data.sequence":  fmt.Sprint(j.Data.Sequence),
		"data.pack":      fmt.Sprint(j.Data.Pack),
		"data.shuffle":   fmt.Sprint(j.Data.Shuffle),
		"seed":           fmt.Sprint(j.Seed),
		"data.path":      fmt.Sprintf("%s, checksum %08x, in %s%s", s.data.Train(), s.data.Train().Checksum(), names(j.Data.Path), s.data.Tokenizer()),
	}}
}

// digest stands for a value in the comparison of runs.
func digest(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	h := sha256.Sum256(text)
	return hex.EncodeToString(h[:8])
}

// names are files without their folders, which may have moved.
func names(paths []string) string {
	short := make([]string, len(paths))
	for i, p := range paths {
		short[i] = filepath.Base(p)
	}
	return strings.Join(short, ", ")
}

// resume fills the weights from a checkpoint, if there is one and it is wanted. Collective.
func (s *session) resume(setup *train.Setup) error {
	j := s.Job
	setup.Keep = s.checkpoints()
	path := j.Checkpoint.Resume
	switch path {
	case "off":
		return nil
	case "auto":
		path = ""
	}
	from, err := setup.Keep.Resume(path, s.Device, s.Mesh.World, s.weights, s.model.Groups(), &j.Optimizer, setup.Steps)
	if err != nil {
		return err
	}
	setup.Resumed, setup.Updates = from.Step, from.Updates
	for _, note := range from.Notes {
		s.Log.Warn().Msg(note)
	}
	if from.Path != "" {
		s.Log.Info().Int64("step", from.Step).Int64("of", setup.Steps).Str("checkpoint", from.Path).Msg("resumed")
	}
	return nil
}

// stopper says when a run should write a checkpoint and end: at SIGUSR1, which Slurm sends ahead of the end when asked to (sbatch
// --signal=USR1@120), or when the time left is less than what two steps and a minute take.
type stopper struct {
	asked   *atomic.Bool
	start   time.Time
	end     time.Time // zero = no limit
	last    time.Time // when it was asked before; at first, when the steps began
	longest time.Duration
}

// onStopRequest hears SIGUSR1. It does so from the start: a request that comes while the model is read is met after the first step.
func (e *Env) onStopRequest() (stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for range signals {
			e.asked.Store(true)
		}
	}()
	return func() { signal.Stop(signals); close(signals) }
}

func newStopper(j *Job, asked *atomic.Bool, start time.Time) (*stopper, error) {
	x := &stopper{asked: asked, start: start, last: time.Now()}
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
	return x.asked.Load() || !x.end.IsZero() && t.Add(2*x.longest+spare).After(x.end)
}
