package train

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/trace"
	"ulysses/model"
)

// Trace records the steps from First to Last, counted from 1. A nil Trace records nothing.
// Recording allocates nothing.
type Trace struct {
	First, Last int64
	Recorder    *trace.Recorder
	Begun       Aligned  // when the first recorded step began
	Ended       Aligned  // when the last recorded step had ended
	Steps       [2]int64 // the first and the last step that were recorded

	clock  *clock.Clock
	world  comm.Comm
	traced tracedWeights
}

// Aligned is the offset of this rank's clock from rank 0's clock, at time At of the recorder.
type Aligned struct {
	At time.Duration
	comm.Alignment
}

// NewTrace prepares to record the steps from first to last of a model. c is the clock of the run.
func NewTrace(first, last int64, r *trace.Recorder, c *clock.Clock, world comm.Comm, groups []*model.Group) *Trace {
	return &Trace{First: first, Last: last, Recorder: r, clock: c, world: world,
		traced: tracedWeights{groups: groups, began: make([]time.Time, len(groups)), to: r}}
}

func (t *Trace) align(to *Aligned) (err error) {
	to.At = t.Recorder.Now()
	to.Alignment, err = comm.Align(t.world, t.Recorder.Now)
	return err
}

// before is called before each step and starts recording before the first step to record.
// Collective.
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

// after is called after each step, which began at the given time, and stops recording after the
// last step to record. Collective.
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

// end stops recording, if it has started. Collective.
func (t *Trace) end() error {
	if t == nil || !t.Recorder.On() {
		return nil
	}
	t.Recorder.Stop()
	t.clock.Record(nil)
	return t.align(&t.Ended)
}

// span records a span that began at the given time and ends now.
func (t *Trace) span(name string, number int64, began time.Time) {
	if t != nil && t.Recorder.On() {
		t.Recorder.Add(trace.Span{Track: trace.Host, Name: name, Number: number}, began, time.Now())
	}
}

// weights returns w, with recorded uses of groups while a trace is recording.
func (t *Trace) weights(w Weights) model.Weights {
	if t == nil || !t.Recorder.On() {
		return w
	}
	t.traced.Weights = w
	return &t.traced
}

// tracedWeights records the time of each use of a group. Uses nest or follow one another.
type tracedWeights struct {
	model.Weights
	groups []*model.Group
	began  []time.Time
	to     *trace.Recorder
}

func (l *tracedWeights) Gather(group int, s device.Stream) error {
	l.began[group] = time.Now()
	return l.Weights.Gather(group, s)
}

func (l *tracedWeights) Release(group int, s device.Stream) error {
	err := l.Weights.Release(group, s)
	l.to.Add(trace.Span{Track: trace.Layers, Name: l.groups[group].Name}, l.began[group], time.Now())
	return err
}
