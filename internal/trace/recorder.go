// Package trace records what a rank did between two moments and writes it in the Chrome trace event
// format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open. The format: "Trace
// Event Format", Google, 2016.
package trace

import "time"

// Lane is a row of a rank's picture. Spans of one lane nest or follow one another, but for those of
// Flights, which may overlap.
type Lane uint8

const (
	Host    Lane = iota // steps, passes and the phases of the clock
	Layers              // stretches of work with a group of weights
	Comm                // operations of a communicator that belong to the stream that computes
	Side                // those on the stream beside it
	Control             // those of the host: counts, sums of losses, flags, errors
	Flights             // exchanges from their start to the end of their wait
	lanes
)

// Span is one thing that was done. Strings are constants of the program or live as long as the
// recorder: nothing is copied.
type Span struct {
	Lane       Lane
	Name       string
	Axis       string        // of the mesh, for communication
	Number     int64         // shown behind the name, if above 0: "step 12"
	Bytes      int64         // sent to other ranks, for communication
	Peers      int           // ranks taken part beside this one
	Begin, End time.Duration // since the recorder's base
}

// Recorder is one rank's account of spans, of fixed size: what does not fit is counted. A nil
// Recorder records nothing. It serves one goroutine.
type Recorder struct {
	Base    time.Time // spans count from here
	Device  string    // kind of the device; what one enqueues and does later has other names
	spans   []Span
	lost    int64
	on      bool
	started time.Duration
}

// Capacity is how many spans a rank keeps: some 13 MB.
const Capacity = 1 << 17

// New allocates all that recording takes.
func New(capacity int) *Recorder {
	return &Recorder{Base: time.Now(), spans: make([]Span, 0, capacity)}
}

// Start begins to record: spans that begin from now on.
func (r *Recorder) Start() { r.on, r.started = true, time.Since(r.Base) }

// Stop ends it.
func (r *Recorder) Stop() { r.on = false }

// On says whether spans are wanted just now.
func (r *Recorder) On() bool { return r != nil && r.on }

// Now is the time since Base.
func (r *Recorder) Now() time.Duration { return time.Since(r.Base) }

// Add keeps a span that is over, in the order in which spans end. Times are read with their
// monotonic part.
func (r *Recorder) Add(s Span, begin, end time.Time) {
	if !r.On() {
		return
	}
	s.Begin, s.End = begin.Sub(r.Base), end.Sub(r.Base)
	if s.Begin < r.started {
		return // what encloses it was not recorded
	}
	if len(r.spans) == cap(r.spans) {
		r.lost++
		return
	}
	r.spans = append(r.spans, s)
}

// Spans are those that were kept, Lost how many were not.
func (r *Recorder) Spans() []Span { return r.spans }
func (r *Recorder) Lost() int64   { return r.lost }
