package report

import (
	"testing"

	"ulysses/job/file"
)

// With a threshold, the last evaluation may be the best one so far: the reason names the threshold.
func TestWhyEarly(t *testing.T) {
	j := &file.Job{}
	j.Eval.Patience = 2
	if got, want := WhyEarly(j), "the held-out loss has not improved in 2 evaluations (eval.patience)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	j.Eval.Metric, j.Eval.Threshold = "books", 0.02
	if got, want := WhyEarly(j), "the held-out loss of books has not improved by more than 0.02 in 2 evaluations "+
		"(eval.patience, eval.threshold)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
