// Package trace records the operations of a rank with their times and writes them in the Chrome
// trace event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open. The
// format is defined in "Trace Event Format", Google, 2016.
//
// A rank makes a Recorder with New and adds a Span for each operation between Start and Stop. One
// rank then writes Header, the Events of all ranks and Footer to a file.
package trace

import "time"

// Track is one of the horizontal rows of a rank in the viewer. Spans of one track nest or follow
// one another, except in InFlight, where they may overlap.
type Track uint8

const (
	Host       Track = iota // steps, passes and the phases of the clock
	Layers                  // the use of one layer group's weights
	Comm                    // communication on the compute stream
	CommStream              // communication on the communication stream
	Control                 // communication of host memory: counts, sums of losses, flags, errors
	InFlight                // all-to-alls from their start to the end of their wait
	tracks
)

// Span is one operation or phase with its time. Its strings are not copied; they are constants of
// the program or live as long as the recorder.
type Span struct {
	Track      Track
	Name       string
	Axis       string        // axis of the mesh, for communication; otherwise ""
	Number     int64         // shown after the name if above 0: "step 12"
	Bytes      int64         // sent to other ranks, for communication
	Peers      int           // other ranks of the communicator, for communication
	Begin, End time.Duration // since Recorder.Base
}

// Recorder holds the spans of one rank. Its size is fixed; spans that do not fit are counted. A nil
// Recorder records nothing. A Recorder serves one goroutine.
type Recorder struct {
	Base    time.Time // the zero of Begin and End
	Device  string    // kind of the device; on an asynchronous one, tracks are named differently
	spans   []Span
	lost    int64
	on      bool
	started time.Duration
}

// Capacity is the number of spans that a rank keeps, about 13 MB.
const Capacity = 1 << 17

// New returns a Recorder for that many spans. It allocates all memory that recording needs.
func New(capacity int) *Recorder {
	return &Recorder{Base: time.Now(), spans: make([]Span, 0, capacity)}
}

// Start begins the recording of spans that begin from now on.
func (r *Recorder) Start() { r.on, r.started = true, time.Since(r.Base) }

// Stop ends the recording.
func (r *Recorder) Stop() { r.on = false }

// On reports whether spans are recorded now.
func (r *Recorder) On() bool { return r != nil && r.on }

// Now returns the time since Base.
func (r *Recorder) Now() time.Duration { return time.Since(r.Base) }

// Add records a span that has ended, if the recorder is on. begin and end have a reading of the
// monotonic clock.
func (r *Recorder) Add(s Span, begin, end time.Time) {
	if !r.On() {
		return
	}
	s.Begin, s.End = begin.Sub(r.Base), end.Sub(r.Base)
	if s.Begin < r.started {
		return // the span that encloses this one was not recorded
	}
	if len(r.spans) == cap(r.spans) {
		r.lost++
		return
	}
	r.spans = append(r.spans, s)
}

// Spans returns the recorded spans, in the order in which they ended.
func (r *Recorder) Spans() []Span { return r.spans }

// Lost returns the number of spans that did not fit.
func (r *Recorder) Lost() int64 { return r.lost }
