// Package clock accounts for time by phase. Phases nest, and each gets only the time that no inner phase took, so that the shares of
// a run add up to one.
package clock

import "time"

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
	stack  []int
	since  time.Time
}

// New starts an empty account.
func New() *Clock { return &Clock{index: map[string]int{}, stack: make([]int, 0, 16)} }

// Push enters a phase, Pop leaves it.
func (c *Clock) Push(name string) {
	if c == nil {
		return
	}
	c.charge()
	i, ok := c.index[name]
	if !ok {
		i = len(c.phases)
		c.phases = append(c.phases, Phase{Name: name})
		c.index[name] = i
	}
	c.phases[i].Calls++
	c.stack = append(c.stack, i)
}

// Pop leaves the phase entered last.
func (c *Clock) Pop() {
	if c == nil {
		return
	}
	c.charge()
	c.stack = c.stack[:len(c.stack)-1]
}

func (c *Clock) charge() {
	now := time.Now()
	if n := len(c.stack); n > 0 {
		c.phases[c.stack[n-1]].Seconds += now.Sub(c.since).Seconds()
	}
	c.since = now
}

// Phases is a copy of the account, in order of first entry.
func (c *Clock) Phases() []Phase {
	if c == nil {
		return nil
	}
	return append([]Phase(nil), c.phases...)
}
