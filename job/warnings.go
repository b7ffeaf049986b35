package job

import (
	"sync"

	"github.com/rs/zerolog"

	"ulysses/data"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// warned collects the warnings of the log for the report. It is a hook of the log.
type warned struct {
	mu  sync.Mutex
	all []string
}

// Run is called for each line of the log. It records warnings.
func (w *warned) Run(_ *zerolog.Event, level zerolog.Level, text string) {
	if level == zerolog.WarnLevel {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.all = append(w.all, text)
	}
}

// list returns a copy of the warnings.
func (w *warned) list() []string {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.all...)
}

// warnOfCut logs how many tokens of the data no sequence has, since documents are cut without
// data.pack. An answer at the end of a long conversation may be among them.
func (e *Env) warnOfCut(setup *train.Setup) {
	warn := func(what string, sets ...*data.Set) {
		cut, tokens := int64(0), int64(0)
		for _, set := range sets {
			cut, tokens = cut+set.Cut(), tokens+set.Cut()+set.Tokens()
		}
		if cut > 0 {
			e.Log.Warn().Msgf("%v: data.pack = false: %d of the %d tokens of %s (%.2g %%) are left out, "+
				"because they are after the first %d of their document; raise data.sequence, or set data.pack = true",
				e.Job.Origin("data.pack"), cut, tokens, what,
				100*float64(cut)/float64(tokens), e.Job.Data.Sequence)
		}
	}
	if setup.Data.Train != nil {
		warn("training data", setup.Data.Train)
	}
	evals := make([]*data.Set, len(setup.Data.Evals))
	for i, x := range setup.Data.Evals {
		evals[i] = x.Set
	}
	warn("evaluation data", evals...)
}

// warn logs the warnings about settings of the job.
func (e *Env) warn(c *model.Config, folder *model.Folder, steps int64) {
	for _, line := range e.Job.Warnings(c, folder, steps, e.Device.Info().Place == tensor.Host) {
		e.Log.Warn().Msg(line)
	}
}
