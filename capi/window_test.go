package main

import (
	"strings"
	"testing"

	"ulysses/internal/status"
)

// ULYSSES_WINDOW without window fields is refused, and the error names the fields. Each field alone
// may be 0.
func TestWindowWithoutFields(t *testing.T) {
	h := newHostOf(t, 1, 4, 2, 2, 4, 0)
	var plan uintptr
	d := h.desc
	d.flags = flagWindow | flagCausal
	err := newPlan(h.ctx, p(&d), p(&plan))
	refused(t, "ULYSSES_WINDOW without fields", status.InvalidArgument, err)
	if err != nil && !strings.Contains(err.Error(), "set window_left, or leave the flag out") {
		t.Error(err)
	}
	for _, w := range [][2]int64{{1, 0}, {0, 1}, {-1, 0}, {0, -1}} {
		d.window_left, d.window_right = w[0], w[1]
		must(t, newPlan(h.ctx, p(&d), p(&plan)))
	}
}
