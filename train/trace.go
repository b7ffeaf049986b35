package train

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/trace"
	"ulysses/model"
)

// Trace records the steps from First to Last, counted from 1. A nil Trace records nothing. Nothing
// is allocated while it does.
type Trace struct {
	First, Last int64
	Recorder    *trace.Recorder
	Begun       Aligned // when the first step did
	Ended       Aligned // and when the last one had; steps between them were recorded
	Steps       [2]int64

	clock  *clock.Clock
	world  comm.Comm
	lender lender
}

// Aligned is how this rank's clock stood to the first rank's at a moment of the recorder.
type Aligned struct {
	At time.Duration
	comm.Alignment
}

// NewTrace prepares to record steps of a model. The clock is the run's.
func NewTrace(first, last int64, r *trace.Recorder, c *clock.Clock, world comm.Comm, groups []*model.Group) *Trace {
	return &Trace{First: first, Last: last, Recorder: r, clock: c, world: world,
		lender: lender{groups: groups, began: make([]time.Time, len(groups)), to: r}}
}

func (t *Trace) align(to *Aligned) (err error) {
	to.At = t.Recorder.Now()
	to.Alignment, err = comm.Align(t.world, t.Recorder.Now)
	return err
}

// before is called ahead of a step: its first one begins to record. Collective.
func (t *Trace) before(step int64) error {
	if t == nil || step < t.First || step > t.Last || t.Recorder.On() {
		return nil
	}
	if err := t.align(&t.Begun); err != nil {
		return err
	}
	t.Steps[0] = step
	t.Recorder.Start()
	t.clock.Record(t.Recorder)
	return nil
}

// after is called behind a step that began at a time: the last one ends the recording. Collective.
func (t *Trace) after(step int64, began time.Time) error {
	if t == nil || !t.Recorder.On() {
		return nil
	}
	t.span("step", step, began)
	t.Steps[1] = step
	if step < t.Last {
		return nil
	}
	return t.end()
}

// end stops recording, if it was going on. Collective.
func (t *Trace) end() error {
	if t == nil || !t.Recorder.On() {
		return nil
	}
	t.Recorder.Stop()
	t.clock.Record(nil)
	return t.align(&t.Ended)
}

// span records what ends now.
func (t *Trace) span(name string, number int64, began time.Time) {
	if t != nil && t.Recorder.On() {
		t.Recorder.Add(trace.Span{Lane: trace.Host, Name: name, Number: number}, began, time.Now())
	}
}

// lend is the weights, with the stretches that use them recorded.
func (t *Trace) lend(w Weights) model.Weights {
	if t == nil || !t.Recorder.On() {
		return w
	}
	t.lender.Weights = w
	return &t.lender
}

// lender records how long each group is needed. Stretches nest or follow one another.
type lender struct {
	model.Weights
	groups []*model.Group
	began  []time.Time
	to     *trace.Recorder
}

func (l *lender) Gather(group int, s device.Stream) error {
	l.began[group] = time.Now()
	return l.Weights.Gather(group, s)
}

func (l *lender) Release(group int, s device.Stream) error {
	err := l.Weights.Release(group, s)
	l.to.Add(trace.Span{Lane: trace.Layers, Name: l.groups[group].Name}, l.began[group], time.Now())
	return err
}
