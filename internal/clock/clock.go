// Package clock accounts for time by phase. Phases nest, and each gets only the time that no inner
// phase took, so that the shares of a run add up to one.
package clock

import (
	"time"

	"ulysses/internal/trace"
)

// Phase is the account of one name.
type Phase struct {
	Name    string
	Calls   int64
	Seconds float64
}

// Clock is one rank's account. A nil Clock counts nothing. It serves one goroutine.
type Clock struct {
	phases []Phase
	index  map[string]int
	stack  []entered
	since  time.Time
	record *trace.Recorder
}

// entered is a phase that has not been left yet.
type entered struct {
	phase int
	at    time.Time
}

// New starts an empty account.
func New() *Clock { return &Clock{index: map[string]int{}, stack: make([]entered, 0, 16)} }

// Record has the phases recorded as spans, besides. nil ends it.
func (c *Clock) Record(r *trace.Recorder) {
	if c != nil {
		c.record = r
	}
}

// Recorder is where phases are recorded; nil = nowhere.
func (c *Clock) Recorder() *trace.Recorder {
	if c == nil {
		return nil
	}
	return c.record
}

// Current is the phase that was entered last and not left; "" where there is none.
func (c *Clock) Current() string {
	if c == nil || len(c.stack) == 0 {
		return ""
	}
	return c.phases[c.stack[len(c.stack)-1].phase].Name
}

// Push enters a phase, Pop leaves it.
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

// Pop leaves the phase entered last.
func (c *Clock) Pop() {
	if c == nil {
		return
	}
	now := c.charge()
	last := c.stack[len(c.stack)-1]
	c.stack = c.stack[:len(c.stack)-1]
	if c.record.On() {
		c.record.Add(trace.Span{Lane: trace.Host, Name: c.phases[last.phase].Name}, last.at, now)
	}
}

func (c *Clock) charge() time.Time {
	now := time.Now()
	if n := len(c.stack); n > 0 {
		c.phases[c.stack[n-1].phase].Seconds += now.Sub(c.since).Seconds()
	}
	c.since = now
	return now
}

// Phases is a copy of the account, in order of first entry.
func (c *Clock) Phases() []Phase {
	if c == nil {
		return nil
	}
	return append([]Phase(nil), c.phases...)
}
