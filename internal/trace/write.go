package trace

import (
	"encoding/json"
	"strconv"
	"time"
)

// trackNames returns the names of a rank's tracks. On a device whose operations return before they
// end, a span is the time in which the host enqueued the operation.
func (r *Recorder) trackNames() [tracks]string {
	later := ""
	if r.Device != "cpu" {
		later = ", enqueued by the host"
	}
	return [tracks]string{
		Host:       "compute: phases" + later,
		Layers:     "compute: weights in use" + later,
		Comm:       "comm: compute stream" + later,
		CommStream: "comm: communication stream" + later,
		Control:    "comm: control",
		InFlight:   "all-to-alls in flight" + later,
	}
}

// categories are the event categories by which a viewer can filter, one for each track.
var categories = [tracks]string{"phase", "weights", "communication", "communication", "control", "communication"}

// A file is Header, the Events of all ranks separated by Comma, and Footer.
const (
	Header = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
	Comma  = ",\n"
)

// Footer returns the end of a file, with facts about the run as names and values.
func Footer(about map[string]string) ([]byte, error) {
	b, err := json.Marshal(about)
	return append(append([]byte("\n],\"otherData\":"), b...), "}\n"...), err
}

// Events appends this rank's events to b. In the format, the rank is a process and its tracks are
// threads. at converts a time since Base to a time in the file. The viewer shows label beside the
// name of the process.
func (r *Recorder) Events(b []byte, rank int, host, label string, at func(time.Duration) time.Duration) []byte {
	b = meta(b, rank, -1, "process_name", "name", "rank "+strconv.Itoa(rank)+" on "+host)
	b = meta(append(b, Comma...), rank, -1, "process_labels", "labels", label)
	b = number(append(b, Comma...), rank, -1, "process_sort_index", rank)
	var used [tracks]bool
	for i := range r.spans {
		used[r.spans[i].Track] = true
	}
	for track, name := range r.trackNames() {
		if used[track] && Track(track) != InFlight {
			b = meta(append(b, Comma...), rank, track, "thread_name", "name", name)
			b = number(append(b, Comma...), rank, track, "thread_sort_index", track)
		}
	}
	for i := range r.spans {
		b = r.event(append(b, Comma...), rank, i, at)
	}
	return b
}

// event appends span i: one complete event ("X"), or in the track InFlight an asynchronous pair
// ("b" and "e").
func (r *Recorder) event(b []byte, rank, i int, at func(time.Duration) time.Duration) []byte {
	s := &r.spans[i]
	begin, end := at(s.Begin), at(s.End)
	name := s.Name
	if s.Axis != "" {
		name = s.Axis + " " + name
	}
	if s.Number > 0 {
		name += " " + strconv.FormatInt(s.Number, 10)
	}
	head := func(b []byte, phase string, t time.Duration) []byte {
		b = append(append(append(b, `{"ph":"`...), phase...), `","pid":`...)
		b = strconv.AppendInt(b, int64(rank), 10)
		b = append(b, `,"tid":`...)
		b = strconv.AppendInt(b, int64(s.Track)+1, 10)
		b = microseconds(append(b, `,"ts":`...), t)
		b = text(append(b, `,"name":`...), name)
		return append(append(append(b, `,"cat":"`...), categories[s.Track]...), '"')
	}
	if s.Track == InFlight { // spans of a thread must not overlap
		id := `,"id":"` + strconv.Itoa(rank) + "." + strconv.Itoa(i) + `"`
		b = append(r.args(append(head(b, "b", begin), id...), s), '}')
		return append(append(head(append(b, Comma...), "e", end), id...), '}')
	}
	b = microseconds(append(head(b, "X", begin), `,"dur":`...), end-begin)
	return append(r.args(b, s), '}')
}

// args appends the bytes and peers of communication.
func (r *Recorder) args(b []byte, s *Span) []byte {
	if s.Axis == "" {
		return b
	}
	b = strconv.AppendInt(append(b, `,"args":{"bytes":`...), s.Bytes, 10)
	return append(strconv.AppendInt(append(b, `,"peers":`...), int64(s.Peers), 10), '}')
}

// microseconds appends a time in microseconds with three decimals.
func microseconds(b []byte, d time.Duration) []byte {
	return strconv.AppendFloat(b, float64(d)/1e3, 'f', 3, 64)
}

// text appends a string as JSON.
func text(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil { // cannot happen for a string
		quoted = []byte(`""`)
	}
	return append(b, quoted...)
}

// meta appends a metadata event whose argument is a text.
func meta(b []byte, rank, track int, name, field, value string) []byte {
	b = metaHead(b, rank, track, name)
	b = append(text(append(append(b, field...), `":`...), value), "}}"...)
	return b
}

// number appends a metadata event whose argument is a sort index.
func number(b []byte, rank, track int, name string, value int) []byte {
	b = metaHead(b, rank, track, name)
	return append(strconv.AppendInt(append(b, `sort_index":`...), int64(value), 10), "}}"...)
}

// metaHead appends the start of a metadata event, up to the quote before the name of its argument.
// track -1 is the process.
func metaHead(b []byte, rank, track int, name string) []byte {
	b = strconv.AppendInt(append(b, `{"ph":"M","pid":`...), int64(rank), 10)
	if track >= 0 {
		b = strconv.AppendInt(append(b, `,"tid":`...), int64(track)+1, 10)
	}
	return append(append(append(b, `,"name":"`...), name...), `","args":{"`...)
}
