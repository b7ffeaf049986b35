package train

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/clock"
)

// A resumed run has the name of the run, and goes on with the sum of the tokens of the lines that
// stay. Lines of later steps are dropped, and the line that was being written.
func TestResumeMetrics(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	first, err := CreateMetrics(path)
	if err != nil {
		t.Fatal(err)
	}
	for step, tokens := range []int64{100, 20, 3000} {
		if err := first.Write(&Record{Step: int64(step + 1), Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(`{"step":4,"tok`)
	}
	if err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	second, err := ResumeMetrics(path, 2, false)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	r := &Record{Step: 3, Tokens: 4}
	if err := second.Write(r); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || r.TotalTokens != 124 || r.Run != first.run || len(r.Run) != 12 ||
		strings.Count(string(text), `"run":"`+r.Run) != 3 || strings.Count(string(text), "\n") != 3 {
		t.Errorf("%v: %d tokens of run %s, want 124 of %s:\n%s", err, r.TotalTokens, r.Run, first.run, text)
	}
}

// A record has the seconds of its step, in computing and in waiting for other ranks, and not the
// sums since the start. A phase may be new.
func TestSecondsOfAStep(t *testing.T) {
	before := []clock.Phase{{Name: "data", Seconds: 5, Waiting: 2}, {Name: "loss", Seconds: 1}}
	after := []clock.Phase{{Name: "data", Seconds: 8, Waiting: 2.5}, {Name: "loss", Seconds: 1.25},
		{Name: "mlp", Seconds: 4, Waiting: 1}}
	seconds, waiting := since(before, after)
	if !maps.Equal(seconds, map[string]float64{"data": 3, "loss": 0.25, "mlp": 4}) ||
		!maps.Equal(waiting, map[string]float64{"data": 0.5, "mlp": 1}) {
		t.Errorf("seconds %v, of which %v in waiting", seconds, waiting)
	}
}
