package job

import (
	"sync"

	"github.com/rs/zerolog"

	"ulysses/model"
	"ulysses/tensor"
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

// warn logs the warnings about settings of the job.
func (e *Env) warn(c *model.Config, folder *model.Folder, steps int64) {
	for _, line := range e.Job.Warnings(c, folder, steps, e.Device.Info().Place == tensor.Host) {
		e.Log.Warn().Msg(line)
	}
}
