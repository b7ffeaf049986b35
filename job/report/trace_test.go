package report

import (
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/internal/trace"
	"ulysses/train"
)

// Times of a rank on another machine are interpolated between the measured offsets. On the same
// machine the clock is exact, unless the measured offsets contradict it.
func TestTimeline(t *testing.T) {
	base := time.Unix(1000, 0)
	r := &trace.Recorder{Base: base}
	root := traceOrigin{Host: "a", Base: base.Add(-time.Second).UnixNano(), Zero: 3 * time.Second}
	x := &train.Trace{Recorder: r}
	set := func(first, last time.Duration) {
		x.Begun = train.Aligned{At: 10 * time.Second,
			Alignment: comm.Alignment{Offset: first, Within: time.Millisecond}}
		x.Ended = train.Aligned{At: 20 * time.Second,
			Alignment: comm.Alignment{Offset: last, Within: 2 * time.Millisecond}}
	}
	for _, c := range []struct {
		host        string
		first, last time.Duration
		want        time.Duration // of an event at 15 s
		within      time.Duration
	}{
		{"a", time.Second, time.Second, 13 * time.Second, 0},
		{"a", time.Second + time.Millisecond/2, time.Second - time.Millisecond, 13 * time.Second, 0},
		// another machine with the same name
		{"a", 2 * time.Second, 2 * time.Second, 14 * time.Second, 2 * time.Millisecond},
		{"b", 2 * time.Second, 2*time.Second + 100*time.Millisecond, 14*time.Second + 50*time.Millisecond,
			2 * time.Millisecond},
	} {
		set(c.first, c.last)
		at, within := timeline(x, root, c.host)
		if got := at(15 * time.Second); got != c.want || within != c.within {
			t.Errorf("%+v: %v within %v", c, got, within)
		}
	}
}
