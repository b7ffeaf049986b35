package comm

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"ulysses/internal/flight"
	"ulysses/internal/status"
)

// TestWatch checks that a late rank ends the job by the watches of the ranks that wait, and that
// their descriptions name the call.
func TestWatch(t *testing.T) {
	late := make(chan string, 3)
	var idle string
	err := within(t, func() error {
		return RunLocal(3, func(c Comm) error {
			w := NewWatch(50*time.Millisecond, "node7", func(text string) {
				late <- text
				c.Abort(status.Comm, text)
			})
			defer w.Close()
			// this sequence has the ranks 1, 3 and 5 of the world
			k := NewCounted(c, "sequence", nil, nil, w).spans(1, 2)
			if err := k.Barrier(); err != nil {
				return err
			}
			if c.Rank() == 2 {
				for k.Inner().(*localComm).g.job.err() == nil {
					time.Sleep(5 * time.Millisecond)
				}
				idle = w.InFlight()
				return nil
			}
			return suiteAllToAll(k)
		})
	})
	if status.Of(err) != status.Comm {
		t.Fatalf("%v", err)
	}
	text := <-late
	for _, want := range []string{"on host node7: all-to-all #2 on axis sequence (ranks 1 to 5 in steps of 2), ",
		" bytes, waited 0."} {
		if !strings.Contains(text, want) {
			t.Errorf("%q lacks %q", text, want)
		}
	}
	if !strings.Contains(idle, "rank 5 on host node7: barrier #1") || !strings.Contains(idle, "no call since") {
		t.Errorf("InFlight on the late rank: %q", idle)
	}
}

// group is the group of calls that a test registers without a communicator.
var group = flight.Group{Axis: "a", Stride: 1, Size: 1}

// TestWatchQuiet checks that short calls, together longer than the limit, are not late, and that
// late calls are reported once. Like TestWatchIdle it has its own clock.
func TestWatchQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		reports := make(chan string, 10)
		w := NewWatch(limit, "h", func(s string) { reports <- s })
		defer w.Close()
		if !strings.Contains(w.InFlight(), "no call made yet") {
			t.Errorf("%q", w.InFlight())
		}
		for range 20 {
			p := w.begin(activeCall{op: "x", group: group})
			time.Sleep(limit - time.Millisecond)
			w.end(p)
		}
		if synctest.Wait(); len(reports) != 0 {
			t.Errorf("late: %s", <-reports)
		}
		a, b := w.begin(activeCall{op: "x", seq: 1, group: group}), w.begin(activeCall{op: "y", seq: 2, group: group})
		if f := w.InFlight(); !strings.Contains(f, "x #1") || !strings.Contains(f, "; ") ||
			!strings.Contains(f, "y #2") {
			t.Errorf("%q", f)
		}
		time.Sleep(3 * limit)
		w.end(a)
		w.end(b)
		if synctest.Wait(); len(reports) != 1 || !strings.Contains(<-reports, "x #1") {
			t.Errorf("%d reports", len(reports))
		}
	})
}

// TestWatchIdle checks that a rank that makes no calls reports itself, once until its next call,
// before the others are late, and not during a call.
func TestWatchIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		slow, late := make(chan string, 10), make(chan string, 10)
		w := NewWatch(limit, "h", func(s string) { late <- s })
		defer w.Close()
		w.LimitIdle(func(s string) { slow <- s })
		call := func(d time.Duration) time.Time {
			p := w.begin(activeCall{op: "x", seq: 7, group: group})
			time.Sleep(d)
			w.end(p)
			return time.Now()
		}
		for range 2 {
			ended := call(time.Millisecond)
			text := <-slow
			if waited := time.Since(ended); waited < limit*3/4 || waited > limit*9/10 ||
				!strings.Contains(text, "x #7") || !strings.Contains(text, "this rank is late") {
				t.Errorf("after %v: %q", waited, text)
			}
			time.Sleep(limit)
		}
		// the timer fires during a short call, for which it would be late much later
		w.LimitIdle(func(s string) { slow <- s })
		time.Sleep(limit*3/4 - time.Millisecond)
		ended := call(2 * time.Millisecond)
		<-slow
		if waited := time.Since(ended); waited > limit*9/10 {
			t.Errorf("after a call in which the timer has fired: %v", waited)
		}
		call(limit * 9 / 10)
		w.LimitIdle(nil)
		time.Sleep(limit)
		if synctest.Wait(); len(slow)+len(late) != 0 {
			t.Errorf("%d reports too many", len(slow)+len(late))
		}
	})
}
