package report

import (
	"strings"
	"testing"

	"ulysses/internal/clock"
	"ulysses/job/plan"
)

// A step that took at least twice its planned time gets a sentence with the cause.
func TestSlowStepsHaveACause(t *testing.T) {
	planned := &plan.Expected{Seconds: 1, Phases: map[string]float64{"mlp": 0.6, "attention": 0.3, "exchange": 0.1}}
	rank := func(mlp, exchange, data float64) rankFacts {
		const steps = 10
		return rankFacts{Host: "a", Threads: 1, Cores: 8,
			Phases: []clock.Phase{{Name: "mlp", Seconds: steps * mlp}, {Name: "attention", Seconds: steps * 0.3},
				{Name: "exchange", Seconds: steps * exchange}, {Name: "data", Seconds: steps * data}}}
	}
	// a rank that waited for so many seconds of its all-to-alls
	waiting := func(mlp, exchange, waited float64) rankFacts {
		f := rank(mlp, exchange, 0)
		f.Phases[2].Waiting = 10 * waited
		return f
	}
	change := func(f rankFacts, how func(*rankFacts)) rankFacts { how(&f); return f }
	for name, c := range map[string]struct {
		facts   []rankFacts
		seconds float64
		want    []string
	}{
		"as planned":   {[]rankFacts{rank(0.6, 0.1, 0)}, 1, nil},
		"nearly twice": {[]rankFacts{rank(1.5, 0.1, 0)}, 1.9, nil},
		"no plan":      {nil, 1000, nil},
		"a slow rank": {[]rankFacts{rank(0.6, 2.1, 0),
			change(rank(2.6, 0.1, 0), func(f *rankFacts) { f.Host = "b" })}, 3,
			[]string{"a step took 3.0 times its plan (3 s, 1 s planned): ",
				"the others waited for rank 1 on b, which computed 2.9 s of a step, rank 0 0.9 s"}},
		"a rank computes slowly": {[]rankFacts{waiting(0.6, 2.1, 2), waiting(2.6, 0.1, 0)}, 3,
			[]string{
				"the others waited for rank 1 on a, which computed 2.9 s of a step, rank 0 0.9 s; rank 1 waited 0 s, rank 0 2 s; look for other processes"}},
		// NCCL: only the host's short calls are measured
		"a slow rank with nccl": {[]rankFacts{waiting(0.6, 2.1, 0.01), waiting(2.6, 0.1, 0.02)}, 3,
			[]string{"the others waited for rank 1 on a, which computed 2.9 s of a step, rank 0 0.9 s"}},
		// All ranks compute as planned. Rank 1 moves bytes for 2 s, and rank 0 waits for it.
		"a rank sends slowly": {[]rankFacts{waiting(0.6, 2.1, 1.9), waiting(0.6, 2.1, 0)}, 3,
			[]string{"the others waited for rank 1 on a, which moved bytes for 2.1 s of a step, rank 0 0.2 s",
				"measure the network of that host"}},
		"waiting in turn": {[]rankFacts{waiting(0.6, 2.1, 1.9), waiting(0.6, 2.1, 1.8)}, 3,
			[]string{
				"communication took 2.1 s of a step, 0.1 s planned; of all communication, ranks waited for one another 1.85 s and moved bytes 0.25 s",
				"no rank is always the last"}},
		"a slow link": {[]rankFacts{waiting(0.6, 3.1, 0.1), waiting(0.6, 3.1, 0.2)}, 4,
			[]string{"waited for one another 0.15 s and moved bytes 2.95 s; measure the network between the hosts"}},
		"shared cores, measured": {[]rankFacts{change(waiting(0.9, 1.8, 1.5), func(f *rankFacts) { f.Cores = 1 }),
			change(waiting(0.9, 1.8, 1.5), func(f *rankFacts) { f.Cores = 1 })}, 3,
			[]string{"and waited for one another 50 % of the time"}},
		"shared cores": {[]rankFacts{change(rank(0.9, 1.8, 0), func(f *rankFacts) { f.Cores = 1 }),
			change(rank(1, 1.7, 0), func(f *rankFacts) { f.Cores = 1 })}, 3,
			[]string{
				"2 ranks of 1 thread share 1 core on a, and waited for one another 58 % of the time; start at most 1 rank a node"}},
		"too many threads": {
			[]rankFacts{change(rank(1, 1.7, 0), func(f *rankFacts) { f.Cores, f.Threads = 4, 4 }),
				change(rank(1, 1.7, 0), func(f *rankFacts) { f.Cores, f.Threads = 4, 4 })}, 3,
			[]string{"2 ranks of 4 threads share 4 cores", "set device.threads = 2"}},
		"taken cores": {[]rankFacts{rank(1.5, 0.7, 0),
			change(rank(1.5, 0.7, 0), func(f *rankFacts) { f.Waited = 10 })}, 2.5,
			[]string{
				"other processes use the cores of a: threads of this job waited for a core 40 % of the time; give the job cores of its own"}},
		"a slow network": {[]rankFacts{rank(0.6, 3.1, 0), rank(0.6, 3.1, 0)}, 4,
			[]string{"a step took 4.0 times",
				"ranks waited for one another or for the network: communication took 3.1 s of a step, 0.1 s planned"}},
		"slow data": {[]rankFacts{rank(0.6, 0.1, 9), rank(0.6, 0.1, 9)}, 10,
			[]string{"data took 9 s of a step, 0 s planned", "faster storage"}},
		"slow work": {[]rankFacts{rank(3.6, 0.1, 0), rank(3.6, 0.1, 0)}, 4,
			[]string{"mlp took 3.6 s of a step, 0.6 s planned", "doctor"}},
	} {
		s := &slowStep{c.facts, 10, c.seconds, planned}
		if c.facts == nil {
			s.planned = nil
		}
		got := s.because()
		if (got == "") != (c.want == nil) {
			t.Errorf("%s: %q", name, got)
		}
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: no %q in %q", name, w, got)
			}
		}
	}
}
