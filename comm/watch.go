package comm

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"ulysses/internal/flight"
)

// Watch is a watchdog for calls of communicators. A dead or late peer does not cause an error: the
// call does not return. Therefore a timer checks how long calls take. One timer serves all calls,
// and it runs only while there is something to check.
type Watch struct {
	limit    time.Duration
	host     string
	onLate   func(description string)
	recorder *flight.Recorder // nil: calls are not recorded

	mu       sync.Mutex
	timer    *time.Timer
	armed    bool
	late     bool // onLate was called
	closed   bool
	active   []activeCall
	last     activeCall
	ended    time.Time                // of the last call
	onIdle   func(description string) // nil: the time between calls is not limited
	idleSaid bool                     // onIdle was called after the last call
}

// activeCall is a call in progress. A slot with an empty op is free.
type activeCall struct {
	op         string
	rank       int // in the group
	seq, bytes int64
	began      time.Time
	group      flight.Group
	control    bool
	checksum   uint8
	number     uint64 // in the flight recorder
}

// NewWatch returns a Watch that calls onLate once, from its own goroutine, when a call takes longer
// than limit. onLate should report the description and abort the job. With a limit of zero it is
// never called, and InFlight still works. host is the name of this machine in descriptions. A nil
// Watch does nothing.
func NewWatch(limit time.Duration, host string, onLate func(description string)) *Watch {
	w := &Watch{limit: limit, host: host, onLate: onLate, active: make([]activeCall, 0, 8)}
	if limit > 0 {
		w.timer = time.AfterFunc(time.Hour, w.check)
		w.timer.Stop()
	}
	return w
}

// SetLimit changes the limit before the first call of a job. Zero means no limit.
func (w *Watch) SetLimit(limit time.Duration) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit = limit
	switch {
	case limit == 0 && w.timer != nil:
		w.timer.Stop()
		w.timer, w.armed = nil, false
	case limit > 0 && w.timer == nil:
		w.timer = time.AfterFunc(time.Hour, w.check)
		w.timer.Stop()
	}
}

// Record makes the watch record every call in a flight recorder from now on.
func (w *Watch) Record(r *flight.Recorder) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recorder = r
}

// Close stops the timer.
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

// LimitIdle also limits the time between calls: onIdle is called once when this rank has made no
// call for three quarters of the limit, which is before the ranks that wait for it are late. nil
// removes the limit. It is for loops in which all ranks communicate regularly.
func (w *Watch) LimitIdle(onIdle func(description string)) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.onIdle, w.idleSaid, w.ended = onIdle, false, time.Now()
	if onIdle != nil {
		w.arm(w.idleLimit())
	}
}

func (w *Watch) idleLimit() time.Duration { return w.limit * 3 / 4 }

// begin registers a call and returns its slot, the argument of end.
func (w *Watch) begin(f activeCall) int {
	if w == nil {
		return 0
	}
	f.began = time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	f.number = w.recorder.Begin(f.op, f.group, f.seq, f.bytes, f.control, f.checksum)
	slot := slices.IndexFunc(w.active, func(f activeCall) bool { return f.op == "" })
	if slot < 0 {
		slot = len(w.active)
		w.active = append(w.active, activeCall{})
	}
	w.active[slot] = f
	w.idleSaid = false
	if w.onIdle != nil {
		w.arm(w.idleLimit()) // this may be the last call for a long time
	} else {
		w.arm(w.limit)
	}
	return slot
}

// blame records that a call has failed because of another rank of the world.
func (w *Watch) blame(rank int) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recorder.Blame(rank)
}

func (w *Watch) end(slot int) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recorder.End(w.active[slot].number)
	w.last, w.ended = w.active[slot], time.Now()
	w.active[slot] = activeCall{}
	// The timer is not stopped: when it fires, check finds no call or the next one.
	if w.onIdle != nil {
		w.arm(w.idleLimit())
	}
}

// Waiting returns the time since the oldest call in progress began; 0 between calls.
func (w *Watch) Waiting() time.Duration {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	longest := time.Duration(0)
	for _, f := range w.active {
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

// check runs when the timer fires. It reports the oldest call if it is late, and otherwise sets the
// timer to the time at which the call will be late. With LimitIdle the timer fires earlier, because
// the call may end at once and be the last one for a long time.
func (w *Watch) check() {
	w.mu.Lock()
	w.armed = false
	now := time.Now()
	oldest := -1
	for i := range w.active {
		if w.active[i].op != "" && (oldest < 0 || w.active[i].began.Before(w.active[oldest].began)) {
			oldest = i
		}
	}
	if oldest < 0 && w.onIdle != nil && !w.closed && !w.late && !w.idleSaid {
		w.checkIdle(now)
		return
	}
	if oldest < 0 || w.closed || w.late {
		w.mu.Unlock()
		return
	}
	waited := now.Sub(w.active[oldest].began)
	if waited < w.limit {
		left := w.limit - waited
		if w.onIdle != nil {
			left = min(left, w.idleLimit())
		}
		w.arm(left)
		w.mu.Unlock()
		return
	}
	w.late = true
	text := w.describe(w.active[oldest], now)
	w.mu.Unlock()
	if w.onLate != nil {
		w.onLate(text)
	}
}

// checkIdle is check without a call in progress. It unlocks w.mu.
func (w *Watch) checkIdle(now time.Time) {
	if idle := now.Sub(w.ended); idle < w.idleLimit() {
		w.arm(w.idleLimit() - idle)
		w.mu.Unlock()
		return
	}
	w.idleSaid = true
	onIdle, text := w.onIdle,
		fmt.Sprintf("%s ended %.1f s ago, and no call has followed: this rank is late", w.name(w.last),
			now.Sub(w.ended).Seconds())
	w.mu.Unlock()
	onIdle(text)
}

func (w *Watch) describe(f activeCall, now time.Time) string {
	return fmt.Sprintf("%s, waited %.1f s", w.name(f), now.Sub(f.began).Seconds())
}

// name names a call and its rank by the ranks of the world, which users know from the launcher: the
// last rank of a sequence of two may be rank 7.
func (w *Watch) name(f activeCall) string {
	return fmt.Sprintf("rank %d on host %s: %s #%d on %v, %d bytes", f.group.World(f.rank), w.host, f.op, f.seq,
		f.group, f.bytes)
}

// InFlight describes this rank's calls in progress or, between calls, the last call and how long
// ago it ended. The rank for which the others wait is between calls.
func (w *Watch) InFlight() string {
	if w == nil {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	text := ""
	for _, f := range w.active {
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
		return fmt.Sprintf("on host %s: no call in progress, no call made yet", w.host)
	}
	return fmt.Sprintf("%s, ended %.1f s ago; no call since", w.name(w.last), now.Sub(w.ended).Seconds())
}
