package trace

import (
	"encoding/json"
	"strconv"
	"time"
)

// laneNames are shown beside a rank's rows. On a device whose operations return before they are
// done, a span is the time that the host took to enqueue.
func (r *Recorder) laneNames() [lanes]string {
	later := ""
	if r.Device != "cpu" {
		later = ", enqueued by the host"
	}
	return [lanes]string{
		Host:    "compute: phases" + later,
		Layers:  "compute: weights in use" + later,
		Comm:    "comm: compute stream" + later,
		Side:    "comm: side stream" + later,
		Control: "comm: control",
		Flights: "exchanges in flight" + later,
	}
}

// categories are what a viewer can filter by.
var categories = [lanes]string{"phase", "weights", "communication", "communication", "control", "communication"}

// Header opens a file; events of all ranks follow, separated by Comma, then Footer with what there
// is to say about the whole.
const (
	Header = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
	Comma  = ",\n"
)

// Footer closes a file.
func Footer(about map[string]string) ([]byte, error) {
	b, err := json.Marshal(about)
	return append(append([]byte("\n],\"otherData\":"), b...), "}\n"...), err
}

// Events writes this rank's events behind b: it is a process, its lanes are threads. at turns a
// span's time into the file's; the label stands beside the process's name.
func (r *Recorder) Events(b []byte, rank int, host, label string, at func(time.Duration) time.Duration) []byte {
	b = meta(b, rank, -1, "process_name", "name", "rank "+strconv.Itoa(rank)+" on "+host)
	b = meta(append(b, Comma...), rank, -1, "process_labels", "labels", label)
	b = number(append(b, Comma...), rank, -1, "process_sort_index", rank)
	var used [lanes]bool
	for i := range r.spans {
		used[r.spans[i].Lane] = true
	}
	for lane, name := range r.laneNames() {
		if used[lane] && Lane(lane) != Flights {
			b = meta(append(b, Comma...), rank, lane, "thread_name", "name", name)
			b = number(append(b, Comma...), rank, lane, "thread_sort_index", lane)
		}
	}
	for i := range r.spans {
		b = r.event(append(b, Comma...), rank, i, at)
	}
	return b
}

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
		b = strconv.AppendInt(b, int64(s.Lane)+1, 10)
		b = micros(append(b, `,"ts":`...), t)
		b = text(append(b, `,"name":`...), name)
		return append(append(append(b, `,"cat":"`...), categories[s.Lane]...), '"')
	}
	if s.Lane == Flights { // may overlap: not a thread's
		id := `,"id":"` + strconv.Itoa(rank) + "." + strconv.Itoa(i) + `"`
		b = append(r.args(append(head(b, "b", begin), id...), s), '}')
		return append(append(head(append(b, Comma...), "e", end), id...), '}')
	}
	b = micros(append(head(b, "X", begin), `,"dur":`...), end-begin)
	return append(r.args(b, s), '}')
}

func (r *Recorder) args(b []byte, s *Span) []byte {
	if s.Axis == "" {
		return b
	}
	b = strconv.AppendInt(append(b, `,"args":{"bytes":`...), s.Bytes, 10)
	return append(strconv.AppendInt(append(b, `,"peers":`...), int64(s.Peers), 10), '}')
}

// micros writes a time in microseconds, to the nanosecond.
func micros(b []byte, d time.Duration) []byte {
	return strconv.AppendFloat(b, float64(d)/1e3, 'f', 3, 64)
}

func text(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil { // a string has none
		quoted = []byte(`""`)
	}
	return append(b, quoted...)
}

func meta(b []byte, rank, lane int, what, field, value string) []byte {
	b = about(b, rank, lane, what)
	b = append(text(append(append(b, field...), `":`...), value), "}}"...)
	return b
}

func number(b []byte, rank, lane int, what string, value int) []byte {
	b = about(b, rank, lane, what)
	return append(strconv.AppendInt(append(b, `sort_index":`...), int64(value), 10), "}}"...)
}

// about opens a metadata event as far as the name of its only argument; lane -1 = of the process.
func about(b []byte, rank, lane int, what string) []byte {
	b = strconv.AppendInt(append(b, `{"ph":"M","pid":`...), int64(rank), 10)
	if lane >= 0 {
		b = strconv.AppendInt(append(b, `,"tid":`...), int64(lane)+1, 10)
	}
	return append(append(append(b, `,"name":"`...), what...), `","args":{"`...)
}
