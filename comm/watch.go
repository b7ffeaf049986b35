package comm

import (
	"fmt"
	"sync"
	"time"
)

// Watch notices calls that take too long. A dead or late peer never shows as an error of the call:
// the call just does not return, so something beside it has to look at the clock. One timer serves
// all calls; it runs only while there is something to look at.
type Watch struct {
	limit  time.Duration
	host   string
	onLate func(description string)

	mu      sync.Mutex
	timer   *time.Timer
	armed   bool
	late    bool // said once
	closed  bool
	flights []flight
	last    flight
	ended   time.Time
	onSlow  func(description string) // nil: being outside all calls is nobody's business
	slow    bool                     // said since the last call
}

// flight is one call under way. An empty op is a free slot.
type flight struct {
	op, axis   string
	rank, size int
	seq, bytes int64
	began      time.Time
}

// NewWatch calls onLate once, from a goroutine of its own, when a call takes longer than limit;
// onLate then reports and aborts. A limit of zero never calls, and InFlight still works. The host
// names this machine in texts. A nil Watch watches nothing.
func NewWatch(limit time.Duration, host string, onLate func(description string)) *Watch {
	w := &Watch{limit: limit, host: host, onLate: onLate, flights: make([]flight, 0, 8)}
	if limit > 0 {
		w.timer = time.AfterFunc(time.Hour, w.look)
		w.timer.Stop()
	}
	return w
}

// Close stops the watch.
func (w *Watch) Close() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.timer != nil {
		w.timer.Stop()
	}
}

// Pace makes this rank answer for the time between calls, too: onSlow is called once when no call
// was made for three quarters of the limit, which is before the peers that wait for it give up. nil
// ends it. It is for loops whose ranks move in step.
func (w *Watch) Pace(onSlow func(description string)) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.onSlow, w.slow, w.ended = onSlow, false, time.Now()
	if onSlow != nil {
		w.arm(w.patience())
	}
}

func (w *Watch) patience() time.Duration { return w.limit * 3 / 4 }

// begin enters a call and returns its place for end.
func (w *Watch) begin(f flight) int {
	if w == nil {
		return 0
	}
	f.began = time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	place := -1
	for i := range w.flights {
		if w.flights[i].op == "" {
			place = i
			break
		}
	}
	if place < 0 {
		place = len(w.flights)
		w.flights = append(w.flights, flight{})
	}
	w.flights[place] = f
	w.slow = false
	if w.onSlow != nil {
		w.arm(w.patience()) // the call may end at once, and nothing follow
	} else {
		w.arm(w.limit)
	}
	return place
}

func (w *Watch) end(place int) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last, w.ended = w.flights[place], time.Now()
	w.flights[place] = flight{}
	// The timer stays: it finds nothing, or the next call.
	if w.onSlow != nil {
		w.arm(w.patience())
	}
}

// Waiting returns how long the oldest current call has taken; 0 between calls.
func (w *Watch) Waiting() time.Duration {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	longest := time.Duration(0)
	for _, f := range w.flights {
		if f.op != "" {
			longest = max(longest, time.Since(f.began))
		}
	}
	return longest
}

func (w *Watch) arm(d time.Duration) {
	if w.timer != nil && !w.armed && !w.late && !w.closed {
		w.armed = true
		w.timer.Reset(d)
	}
}

// look is the timer's: it finds the oldest call, and comes back when that would be late.
func (w *Watch) look() {
	w.mu.Lock()
	w.armed = false
	now := time.Now()
	oldest := -1
	for i := range w.flights {
		if w.flights[i].op != "" && (oldest < 0 || w.flights[i].began.Before(w.flights[oldest].began)) {
			oldest = i
		}
	}
	if oldest < 0 && w.onSlow != nil && !w.closed && !w.late && !w.slow {
		w.lookOutside(now)
		return
	}
	if oldest < 0 || w.closed || w.late {
		w.mu.Unlock()
		return
	}
	waited := now.Sub(w.flights[oldest].began)
	if waited < w.limit {
		w.arm(w.limit - waited)
		w.mu.Unlock()
		return
	}
	w.late = true
	text := w.describe(w.flights[oldest], now)
	w.mu.Unlock()
	if w.onLate != nil {
		w.onLate(text)
	}
}

// lookOutside is look where no call is under way; it unlocks.
func (w *Watch) lookOutside(now time.Time) {
	if idle := now.Sub(w.ended); idle < w.patience() {
		w.arm(w.patience() - idle)
		w.mu.Unlock()
		return
	}
	w.slow = true
	say, text := w.onSlow, fmt.Sprintf("%s ended %.1f s ago, and nothing since: this rank is late", w.name(w.last), now.Sub(w.ended).Seconds())
	w.mu.Unlock()
	say(text)
}

func (w *Watch) describe(f flight, now time.Time) string {
	return fmt.Sprintf("%s, waited %.1f s", w.name(f), now.Sub(f.began).Seconds())
}

func (w *Watch) name(f flight) string {
	return fmt.Sprintf("rank %d of %d on host %s: %s #%d on axis %s, %d bytes", f.rank, f.size, w.host, f.op, f.seq, f.axis, f.bytes)
}

// InFlight says what this rank is doing in its communicators: each call under way, or which was the
// last and how long ago. A rank that the others wait for is outside every call, and its text says
// so.
func (w *Watch) InFlight() string {
	if w == nil {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	text := ""
	for _, f := range w.flights {
		if f.op == "" {
			continue
		}
		if text != "" {
			text += "; "
		}
		text += w.describe(f, now)
	}
	switch {
	case text != "":
		return text
	case w.last.op == "":
		return fmt.Sprintf("on host %s: in no call, none made yet", w.host)
	}
	return fmt.Sprintf("%s, ended %.1f s ago; in no call since", w.name(w.last), now.Sub(w.ended).Seconds())
}
