// Package clock measures the time of a rank by phase. Push enters a phase and Pop leaves it. Phases
// nest, and a phase is charged only for the time outside of its inner phases, so the times of all
// phases add up to the time of the run.
package clock

import (
	"time"

	"ulysses/internal/trace"
)

// Phase is the number of entries and the time of one phase, without its inner phases.
type Phase struct {
	Name    string
	Calls   int64
	Seconds float64
	Waiting float64 // seconds, of Seconds, in which this rank waited for other ranks (Clock.Waited)
}

// labels maps phases whose names in files are not the names that readers know. Files that programs
// read (metrics.jsonl, trace.json) have the phase's own name.
var labels = map[string]string{
	"exchange": "communication", // all-to-all and send-receive
	"wait":     "device wait",   // the host waits for a stream of the device
}

// Label returns the name of a phase in tables, messages and reports.
func Label(phase string) string {
	if label, ok := labels[phase]; ok {
		return label
	}
	return phase
}

// Clock holds the phases of one rank. A nil Clock counts nothing. A Clock serves one goroutine.
type Clock struct {
	phases []Phase
	index  map[string]int
	stack  []entered
	since  time.Time
	record *trace.Recorder
}

// entered is a phase that has not been left yet.
type entered struct {
	phase int // index in Clock.phases
	at    time.Time
}

// New returns a Clock without phases.
func New() *Clock { return &Clock{index: map[string]int{}, stack: make([]entered, 0, 16)} }

// Record makes the clock also record each phase as a span of r. nil ends the recording.
func (c *Clock) Record(r *trace.Recorder) {
	if c != nil {
		c.record = r
	}
}

// Recorder returns the recorder that Record was given, or nil.
func (c *Clock) Recorder() *trace.Recorder {
	if c == nil {
		return nil
	}
	return c.record
}

// Current returns the innermost open phase, or "" if no phase is open.
func (c *Clock) Current() string {
	if c == nil || len(c.stack) == 0 {
		return ""
	}
	return c.phases[c.stack[len(c.stack)-1].phase].Name
}

// Push enters a phase.
func (c *Clock) Push(name string) {
	if c == nil {
		return
	}
	now := c.charge()
	i, ok := c.index[name]
	if !ok {
		i = len(c.phases)
		c.phases = append(c.phases, Phase{Name: name})
		c.index[name] = i
	}
	c.phases[i].Calls++
	c.stack = append(c.stack, entered{i, now})
}

// Pop leaves the innermost phase. It panics if no phase is open.
func (c *Clock) Pop() {
	if c == nil {
		return
	}
	now := c.charge()
	last := c.stack[len(c.stack)-1]
	c.stack = c.stack[:len(c.stack)-1]
	if c.record.On() {
		c.record.Add(trace.Span{Track: trace.Host, Name: c.phases[last.phase].Name}, last.at, now)
	}
}

// Waited records that d of the time of the innermost phase was spent waiting for other ranks.
func (c *Clock) Waited(d time.Duration) {
	if c != nil && len(c.stack) > 0 {
		c.phases[c.stack[len(c.stack)-1].phase].Waiting += d.Seconds()
	}
}

// charge adds the time since the last call to the innermost phase, and returns the present time.
func (c *Clock) charge() time.Time {
	now := time.Now()
	if n := len(c.stack); n > 0 {
		c.phases[c.stack[n-1].phase].Seconds += now.Sub(c.since).Seconds()
	}
	c.since = now
	return now
}

// Phases returns a copy of all phases, in the order of their first entry.
func (c *Clock) Phases() []Phase {
	if c == nil {
		return nil
	}
	return append([]Phase(nil), c.phases...)
}
