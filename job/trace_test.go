package job

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/trace"
)

// event is an event of trace.json.
type event struct {
	Ph, Name, Cat, ID string
	PID, TID          int
	TS, Dur           float64
	Args              map[string]any
}

func (e event) end() float64 { return e.TS + e.Dur }

func readTrace(t *testing.T, path string) (events []event, about map[string]string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		TraceEvents []event
		OtherData   map[string]string
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	return file.TraceEvents, file.OtherData
}

// A trace has exactly the steps of output.trace. The spans of each rank nest and lie inside these
// steps, and the number of collectives is that of the ledger's formulas.
func TestTrace(t *testing.T) {
	dir, run := newKept(t, "parallel.ulysses=2", "parallel.zero=3", "output.trace=[2, 3]", "checkpoint.every=0")
	out, err := run(4)
	if err != nil {
		t.Fatal(err)
	}
	events, about := readTrace(t, filepath.Join(dir, "out", "trace.json"))
	if about["steps"] != "2 to 3" || about["clocks"] != "one clock for all ranks" ||
		!strings.Contains(out, "trace.json: steps 2 to 3") {
		t.Errorf("the file says %v, the program %s", about, out)
	}
	names := map[string]string{} // of processes and threads
	lanes := map[[2]int][]event{}
	for _, e := range events {
		switch e.Ph {
		case "M":
			if n, ok := e.Args["name"].(string); ok {
				names[fmt.Sprint(e.PID, " ", e.TID)] = n
			}
		case "X":
			lanes[[2]int{e.PID, e.TID}] = append(lanes[[2]int{e.PID, e.TID}], e)
		default:
			t.Errorf("%+v: this job has no asynchronous collective", e)
		}
	}
	for rank := range 4 {
		if !strings.HasPrefix(names[fmt.Sprint(rank, " 0")], fmt.Sprintf("rank %d on ", rank)) {
			t.Errorf("process %d is called %q", rank, names[fmt.Sprint(rank, " 0")])
		}
		var steps []event
		for _, e := range lanes[[2]int{rank, int(trace.Host) + 1}] {
			if strings.HasPrefix(e.Name, "step ") {
				steps = append(steps, e)
			}
		}
		if len(steps) != 2 || steps[0].Name != "step 2" || steps[1].Name != "step 3" {
			t.Fatalf("rank %d: steps %+v", rank, steps)
		}
		for _, lane := range []trace.Track{trace.Host, trace.Layers, trace.Comm, trace.CommStream, trace.Control} {
			spans := lanes[[2]int{rank, int(lane) + 1}]
			if len(spans) == 0 || names[fmt.Sprint(rank, " ", int(lane)+1)] == "" {
				t.Errorf("rank %d: lane %d has %d spans and is called %q", rank, lane, len(spans),
					names[fmt.Sprint(rank, " ", int(lane)+1)])
			}
			checkNested(t, spans, steps[0].TS, steps[1].end())
		}
	}
	// ranks, steps, passes, layers, all-to-alls
	if n := count(lanes, int(trace.Comm), "sequence all-to-all"); n != 4*2*2*2*4 {
		t.Errorf("%d all-to-alls", n)
	}
	if n := count(lanes, int(trace.Host), "attention"); n != 4*2*2*2*2 { // forward and backward
		t.Errorf("%d phases of attention", n)
	}
	// groups, and the tied table twice
	if count(lanes, int(trace.CommStream), "world reduce-scatter") != 4*2*2*5 ||
		count(lanes, int(trace.Comm), "world reduce-scatter") != 0 {
		t.Errorf("%d sums of gradients on the side stream", count(lanes, int(trace.CommStream), "world reduce-scatter"))
	}

	// A run that does none of the steps says so.
	dir, run = newKept(t, "output.trace=[9, 12]", "checkpoint.every=0")
	if out, err = run(1); err != nil ||
		!strings.Contains(out, "output.trace = [9, 12], and this run did no step of these") {
		t.Error(err, out)
	}
	if _, err := os.Stat(filepath.Join(dir, "out", "trace.json")); err == nil {
		t.Error("a trace of no steps was written")
	}
}

func count(lanes map[[2]int][]event, lane int, name string) (n int) {
	for at, spans := range lanes {
		for _, e := range spans {
			if at[1] == lane+1 && e.Name == name {
				n++
			}
		}
	}
	return n
}

// checkNested checks that the spans lie inside [lo, hi], and that they nest or follow one another,
// to the nanosecond, which is the resolution of the file.
func checkNested(t *testing.T, spans []event, lo, hi float64) {
	t.Helper()
	const nano = 2e-3
	slices.SortStableFunc(spans, func(a, b event) int {
		if c := cmp.Compare(a.TS, b.TS); c != 0 {
			return c
		}
		return cmp.Compare(b.Dur, a.Dur)
	})
	var open []event
	for _, e := range spans {
		for len(open) > 0 && open[len(open)-1].end() <= e.TS+nano {
			open = open[:len(open)-1]
		}
		if len(open) > 0 && e.end() > open[len(open)-1].end()+nano {
			t.Errorf("%+v ends behind %+v, which it begins in", e, open[len(open)-1])
		}
		if e.TS < lo-nano || e.end() > hi+nano || e.Dur < 0 {
			t.Errorf("%+v lies outside the steps, %f to %f", e, lo, hi)
		}
		open = append(open, e)
	}
}
