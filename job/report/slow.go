package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"ulysses/internal/clock"
	"ulysses/internal/units"
	"ulysses/job/plan"
)

// slowFrom is the ratio of measured to planned time of a step from which the run prints the cause.
const slowFrom = 2

// slowStep compares the steps of a run with their plan.
type slowStep struct {
	facts   []rankFacts
	steps   float64 // number of steps
	seconds float64 // mean of a step
	planned *plan.Expected
}

// betweenRanks reports whether a phase is communication, which includes waiting for other ranks:
// "exchange" is all-to-all and send-receive, "reduce" every other collective.
func betweenRanks(phase string) bool { return phase == "exchange" || phase == "reduce" }

// computes reports whether a phase is work of this rank alone.
func computes(phase string) bool { return !betweenRanks(phase) }

// of returns a rank's seconds in a step, summed over the phases that the filter selects.
func (s *slowStep) of(rank int, in func(phase string) bool) (sum float64) {
	for _, p := range s.facts[rank].Phases {
		if in(p.Name) {
			sum += p.Seconds / s.steps
		}
	}
	return sum
}

// waiting returns a rank's seconds in a step in which it waited for other ranks.
func (s *slowStep) waiting(rank int) (sum float64) {
	for _, p := range s.facts[rank].Phases {
		sum += p.Waiting / s.steps
	}
	return sum
}

// mean returns the mean of a rank's value over all ranks.
func (s *slowStep) mean(of func(rank int) float64) (sum float64) {
	for r := range s.facts {
		sum += of(r) / float64(len(s.facts))
	}
	return sum
}

// meanOf returns the mean of s.of over all ranks.
func (s *slowStep) meanOf(in func(phase string) bool) float64 {
	return s.mean(func(rank int) float64 { return s.of(rank, in) })
}

// measured reports whether the communicators measure waiting. Kernels of NCCL do not: of a run with
// NCCL, waiting has only the calls of the host.
func (s *slowStep) measured() bool { return s.mean(s.waiting) > 0 }

// because returns a warning with cause and fix if a step took at least slowFrom times its plan,
// otherwise "". The cause is one that explains at least half of the excess: a rank for which the
// others waited because it computes or sends slowly, ranks that share cores, or cores that other
// processes use; otherwise the phase with the largest excess.
func (s *slowStep) because() string {
	if s.planned == nil || !(s.seconds >= slowFrom*s.planned.Seconds) {
		return ""
	}
	excess := s.seconds - s.planned.Seconds
	cause, fix := s.slowRank(excess)
	if cause == "" {
		cause, fix = s.sharedCores()
	}
	if cause == "" {
		cause, fix = s.takenCores()
	}
	if cause == "" {
		cause, fix = s.slowPhase()
	}
	return fmt.Sprintf("a step took %.1f times its plan (%.3g s, %.3g s planned): %s; %s", s.seconds/s.planned.Seconds,
		s.seconds, s.planned.Seconds, cause, fix)
}

// slowRank finds a rank for which the others wait. It is the rank that waits least, where waiting
// is measured; it computes longer than the others, or its bytes take longer. If all ranks wait
// alike, or waiting is not measured, it is a rank that computes longer.
func (s *slowStep) slowRank(excess float64) (cause, fix string) {
	computed := func(rank int) float64 { return s.of(rank, computes) }
	moved := func(rank int) float64 { return s.of(rank, betweenRanks) - s.waiting(rank) }
	other, slowest := s.extremes(s.waiting)
	if s.waiting(other)-s.waiting(slowest) < excess/2 {
		slowest, other = s.extremes(computed)
		if computed(slowest)-computed(other) < excess/2 {
			return "", ""
		}
	}
	if computed(slowest)-computed(other) >= moved(slowest)-moved(other) {
		return s.lateRank(slowest, other, "computed", computed), "look for other processes on that host"
	}
	return s.lateRank(slowest, other, "moved bytes for", moved), "measure the network of that host"
}

// lateRank describes a rank for which another one waited.
func (s *slowStep) lateRank(late, other int, did string, seconds func(rank int) float64) string {
	text := fmt.Sprintf("the others waited for rank %d on %s, which %s %.3g s of a step, rank %d %.3g s", late,
		s.facts[late].Host, did, seconds(late), other, seconds(other))
	if s.measured() {
		text += fmt.Sprintf("; rank %d waited %.3g s, rank %d %.3g s", late, s.waiting(late), other, s.waiting(other))
	}
	return text
}

// extremes returns the ranks with the largest and with the smallest value.
func (s *slowStep) extremes(of func(rank int) float64) (most, least int) {
	for r := range s.facts {
		if of(r) > of(most) {
			most = r
		}
		if of(r) < of(least) {
			least = r
		}
	}
	return most, least
}

// sharedCores finds a host whose ranks have more threads than the host has cores.
func (s *slowStep) sharedCores() (cause, fix string) {
	for _, f := range s.facts {
		ranks := 0
		for _, other := range s.facts {
			if other.Host == f.Host {
				ranks++
			}
		}
		threads := max(1, f.Threads)
		if f.Cores == 0 || ranks*threads <= f.Cores {
			continue
		}
		fix = fmt.Sprintf("start at most %s a node", units.Count(max(1, f.Cores/threads), "rank"))
		if threads > 1 && ranks <= f.Cores {
			fix = fmt.Sprintf("set device.threads = %d", f.Cores/ranks)
		}
		return fmt.Sprintf("%d ranks of %s share %s on %s, and waited for one another %.0f %% of the time", ranks,
			units.Count(threads, "thread"), units.Count(f.Cores, "core"), f.Host,
			100*s.waited()/s.seconds), fix
	}
	return "", ""
}

// waited returns the mean seconds in a step in which a rank waited for others, or, where waiting is
// not measured, in which it communicated.
func (s *slowStep) waited() float64 {
	if s.measured() {
		return s.mean(s.waiting)
	}
	return s.meanOf(betweenRanks)
}

// takenCores finds a host whose cores other processes use: threads were ready to run and had no
// core.
func (s *slowStep) takenCores() (cause, fix string) {
	const least = 0.15 // of the time
	worst := slices.MaxFunc(s.facts, func(a, b rankFacts) int { return cmp.Compare(a.Waited, b.Waited) })
	share := worst.Waited / (s.steps * s.seconds * float64(max(1, worst.Threads)))
	if share < least {
		return "", ""
	}
	return fmt.Sprintf("other processes use the cores of %s: threads of this job waited for a core %.0f %% of the time",
			worst.Host, 100*min(1, share)),
		"give the job cores of its own"
}

// slowPhase finds the phase that exceeds its plan by the most.
func (s *slowStep) slowPhase() (cause, fix string) {
	seen, name, most := map[string]bool{}, "", math.Inf(-1)
	for _, f := range s.facts {
		for _, p := range f.Phases {
			if seen[p.Name] {
				continue
			}
			seen[p.Name] = true
			over := s.meanOf(func(phase string) bool { return phase == p.Name }) - s.planned.Phases[p.Name]
			if over > most {
				name, most = p.Name, over
			}
		}
	}
	took := s.meanOf(func(phase string) bool { return phase == name })
	text := fmt.Sprintf("%s took %.3g s of a step, %.3g s planned", clock.Label(name), took, s.planned.Phases[name])
	switch {
	case betweenRanks(name) && !s.measured():
		return "ranks waited for one another or for the network: " + text, "measure the network between the hosts"
	case betweenRanks(name):
		waited := s.waited()
		text += fmt.Sprintf("; of all communication, ranks waited for one another %.3g s and moved bytes %.3g s",
			waited, s.meanOf(betweenRanks)-waited)
		if 2*waited > s.meanOf(betweenRanks) {
			return text, "look for other processes on the hosts: no rank is always the last"
		}
		return text, "measure the network between the hosts"
	case name == "data":
		return text, "move the data to faster storage"
	case name == "checkpoint":
		return text, "raise checkpoint.every"
	}
	return text, "run ulysses-mpi doctor on every host, and compare"
}
