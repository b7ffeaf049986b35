package report

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/testkit/near"
)

// The smoothed loss is drawn beside the loss of each step. It follows a change within its window,
// has no bias towards the first step, and skips gaps.
func TestSmoothedLoss(t *testing.T) {
	h := &history{Steps: 300}
	for i := range 300 {
		y := 5.0
		if i >= 150 {
			y = 3
		}
		y += 0.5 * float64(1-2*(i%2)) // noise
		switch i {
		case 10:
			y = math.NaN()
		case 20:
			y = math.Inf(1)
		}
		h.loss.X, h.loss.Y = append(h.loss.X, float64(i+1)), append(h.loss.Y, y)
	}
	s := h.charts()[0].Series
	if len(s) != 2 || s[0].Style != "faint" || s[1].Style != "line" || s[1].Name != "smoothed over 10 steps" {
		t.Fatalf("%+v", s)
	}
	for at, want := range map[int]float64{0: 5.5, 149: 5, 299: 3} {
		near.Value(t, fmt.Sprintf("smoothed loss of step %d", at+1), *s[1].Y[at], want, 0.06)
	}
	if s[1].Y[10] != nil || s[1].Y[20] != nil || s[1].Y[21] == nil {
		t.Error("gaps")
	}
	h.loss = points{h.loss.X[:19], h.loss.Y[:19]}
	if s := h.charts()[0].Series; len(s) != 1 || s[0].Style != "line" {
		t.Errorf("a short run: %+v", s)
	}
}

// All numbers of an axis have one unit, which the axis's label names: never 16.00k beside 8000.
func TestAxesHaveOneUnit(t *testing.T) {
	for _, x := range []struct {
		unit  string
		most  float64
		scale float64
		name  string
	}{
		{"tokens/s", 8000, 1, "tokens/s"}, {"tokens/s", 16000, 1e3, "k tokens/s"},
		{"tokens/s", 3.2e6, 1e6, "M tokens/s"},
		{"FLOP/s", 0.0083, 1e-3, "GFLOP/s"}, {"FLOP/s", 0.027, 1e-3, "GFLOP/s"}, {"FLOP/s", 417, 1, "TFLOP/s"},
		{"FLOP/s", 5e-7, 1e-9, "kFLOP/s"},
		{"nats a token", 6.2, 1, "nats a token"}, {"nats a token", 2e7, 1e7, "nats a token × 10⁷"},
		{"", 5e-3, 1e-3, "× 10⁻³"}, {"", 3e-4, 1e-4, "× 10⁻⁴"}, {"", 0, 1, ""}, {"", 0.5, 1, ""},
	} {
		if scale, name := axisScale(x.most, x.unit); !(math.Abs(scale/x.scale-1) <= 1e-12) || name != x.name {
			t.Errorf("%v %s: %v %q", x.most, x.unit, scale, name)
		}
	}
	h := &history{}
	for i := range int64(30) {
		loss, norm, rate, speed, flops := 5.0, 1.0, 3e-4, 8000+300*float64(i), 0.4
		h.add(&historyLine{Step: i + 1, Loss: &loss, GradNorm: &norm, LR: &rate, TokensPerSecond: &speed,
			ModelTFLOPS: &flops}, nil)
	}
	var axes []string
	for _, c := range h.charts() {
		axes = append(axes, c.Axis)
	}
	if want := []string{"loss, nats a token", "norm before clipping", "learning rate, × 10⁻⁴", "all ranks, k tokens/s",
		"a rank, causal, GFLOP/s"}; !slices.Equal(axes, want) {
		t.Errorf("axes %q", axes)
	}
}

// NaN and Inf become gaps, a long run is thinned without losing a peak, and an incomplete line is
// skipped.
func TestHistory(t *testing.T) {
	var b strings.Builder
	const n = 50000
	for i := range n {
		loss := fmt.Sprint(2 + math.Sin(float64(i)/100))
		switch i {
		case 12345:
			loss = "99.5"
		case 23456:
			loss = "-7"
		case 34567:
			loss = "null"
		}
		fmt.Fprintf(&b, `{"step":%d,"loss":%s,"grad_norm":1,"lr":0.1,"tokens_per_second":5,"model_tflops":1}`+"\n",
			i+1, loss)
	}
	b.WriteString(`{"step":50000,"eval_loss":null,"eval_tokens":7}` + "\n" + `{"step":50001,"lo`)
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := readHistory(path, false)
	if err != nil || h.Steps != n || h.NotFinite != 1 || len(h.Evals) != 1 || !math.IsNaN(h.Evals[0].Loss) {
		t.Fatalf("%v %d steps, %d not finite, %v", err, h.Steps, h.NotFinite, h.Evals)
	}
	c := h.charts()[0]
	s := c.Series[0]
	if len(s.X) > mostPoints+4 || !slices.IsSorted(s.X) || s.X[0] != 1 || s.X[len(s.X)-1] != n {
		t.Errorf("%d points from %v to %v", len(s.X), s.X[0], s.X[len(s.X)-1])
	}
	low, high, gaps := math.Inf(1), math.Inf(-1), 0
	for i, y := range s.Y {
		if y == nil {
			if gaps++; s.X[i] != 34568 {
				t.Errorf("a gap at %v", s.X[i])
			}
			continue
		}
		low, high = min(low, *y), max(high, *y)
	}
	if low != -7 || high != 99.5 || gaps != 1 || len(c.Series) != 3 || c.Series[2].Name != "held out" {
		t.Errorf("lowest %v, highest %v, %d gaps", low, high, gaps)
	}
	if _, err := json.Marshal(h.charts()); err != nil {
		t.Error(err)
	}
	if !h.charts()[1].Log || positive([]float64{1, 0}) || positive([]float64{math.NaN()}) {
		t.Error("logarithmic axes")
	}
}

// The loss of each evaluation set has a colour of its own, beside the loss of all sets.
func TestSetsHaveColours(t *testing.T) {
	line := `{"step":1,"loss":1,"grad_norm":1,"lr":0.1,"tokens_per_second":5,"model_tflops":1}
{"step":1,"eval_loss":2,"eval_tokens":7,"eval_a_loss":3,"eval_a_tokens":3,"eval_b_loss":4,"eval_b_tokens":4}
`
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	if err := os.WriteFile(path, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := readHistory(path, false)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range h.charts()[0].Series {
		got = append(got, fmt.Sprint(c.Name, " ", c.Set))
	}
	if want := []string{"each step 0", "held out 0", "held out: a 1", "held out: b 2"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
