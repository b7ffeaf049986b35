package trace

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// Spans that do not fit are counted, spans that began before Start are left out, recording
// allocates nothing, and names are escaped.
func TestRecorder(t *testing.T) {
	var none *Recorder
	if none.Add(Span{}, time.Now(), time.Now()); none.On() {
		t.Error("a nil recorder is on")
	}
	r := New(3)
	before := time.Now()
	r.Add(Span{Name: "off"}, before, time.Now())
	r.Start()
	r.Add(Span{Name: "early"}, before, time.Now())
	span := Span{Track: Comm, Name: `all"to</script>all`, Axis: "sequence", Bytes: 5, Peers: 3}
	if n := testing.AllocsPerRun(10, func() { now := time.Now(); r.Add(span, now, now) }); n != 0 {
		t.Errorf("%v allocations a span", n)
	}
	if len(r.Spans()) != 3 || r.Lost() != 8 { // AllocsPerRun runs once more
		t.Errorf("%d spans, %d lost", len(r.Spans()), r.Lost())
	}
	r.Device = "cuda"
	r.spans[1].Track = InFlight
	b := r.Events([]byte(Header), 7, "here", "label", func(d time.Duration) time.Duration { return d + time.Hour })
	end, err := Footer(map[string]string{"a": "b"})
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		TraceEvents []map[string]any
		OtherData   map[string]string
	}
	if err := json.Unmarshal(append(b, end...), &file); err != nil {
		t.Fatal(err, string(b))
	}
	phases := ""
	for _, e := range file.TraceEvents {
		phases += e["ph"].(string)
		if ts, ok := e["ts"].(float64); ok &&
			(ts < 3.6e9 || e["pid"] != 7.0 || e["name"] != `sequence all"to</script>all`) {
			t.Errorf("%v", e)
		}
	}
	if phases != "MMMMMXbeX" || !strings.Contains(string(b), "comm: compute stream, enqueued by the host") ||
		file.OtherData["a"] != "b" {
		t.Errorf("events %s in %s", phases, b)
	}
}
