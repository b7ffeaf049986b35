package job

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/tensor"
	"ulysses/train"
)

// A rank is a straggler if its own work has taken more than 1/stragglerShare of the median of all
// ranks for stragglerWindows windows of stragglerSteps steps each, and not by less than
// stragglerLeast. NVIDIA's resiliency extension
// has the same share.
const (
	stragglerSteps   = 10
	stragglerWindows = 3
	stragglerShare   = 0.75
	stragglerLeast   = 0.01 // seconds of a step by which it is slower
)

// stragglers finds ranks that are slower than the others while a run goes on, from the medians of
// the phases in which a rank works alone: the others wait for it in communication. It serves
// devices whose work is done when a phase ends. A nil *stragglers does nothing.
type stragglers struct {
	world  comm.Comm
	warn   func(text string)
	host   string
	window map[string][]float64 // of this rank: seconds of each phase, by step
	slow   []int                // by rank: consecutive windows in which it was slow
	named  []bool               // by rank: a warning has named it
}

// pace is what a rank tells the others about a window.
type pace struct {
	Host   string
	Phases map[string]float64 // median seconds of a step
}

func newStragglers(e *Env) *stragglers {
	world := e.Mesh.World
	if world.Size() == 1 || e.Device.Info().Place != tensor.Host {
		return nil
	}
	host, _ := os.Hostname()
	return &stragglers{world: world, host: host, window: map[string][]float64{}, slow: make([]int, world.Size()),
		named: make([]bool, world.Size()),
		warn:  func(text string) { e.Log.Warn().Msg(text) }}
}

// step adds a step, and compares the ranks at the end of a window. Collective.
func (x *stragglers) step(r *train.Record) error {
	if x == nil {
		return nil
	}
	for phase, seconds := range r.PhaseSeconds {
		if phase != "exchange" && phase != "reduce" {
			x.window[phase] = append(x.window[phase], seconds)
		}
	}
	if r.Step%stragglerSteps != 0 {
		return nil
	}
	own := pace{Host: x.host, Phases: map[string]float64{}}
	for phase, seconds := range x.window {
		for len(seconds) < stragglerSteps {
			seconds = append(seconds, 0) // steps without the phase
		}
		own.Phases[phase], x.window[phase] = median(seconds), seconds[:0]
	}
	all, err := comm.GatherJSON(x.world, "stragglers", own)
	if err == nil && x.world.Rank() == 0 {
		x.compare(all)
	}
	return err
}

// compare warns of a rank that has been slow for long enough, once.
func (x *stragglers) compare(all []pace) {
	sums := make([]float64, len(all))
	for i, p := range all {
		for _, seconds := range p.Phases {
			sums[i] += seconds
		}
	}
	usual := median(slices.Clone(sums))
	for i := range all {
		if sums[i]*stragglerShare <= usual || sums[i]-usual < stragglerLeast {
			x.slow[i], x.named[i] = 0, false
			continue
		}
		if x.slow[i]++; x.slow[i] < stragglerWindows || x.named[i] {
			continue
		}
		x.named[i] = true
		phase, other := worstPhase(all, i)
		x.warn(fmt.Sprintf(
			"rank %d on host %s has been slower than the others for %d steps, and they wait for it: its own work takes %.3g s of a step, the median of all ranks is %.3g s; most of the difference is in %s (%.3g s, median %.3g s); look for other processes on that host",
			i, all[i].Host, stragglerWindows*stragglerSteps, sums[i], usual, clock.Label(phase),
			all[i].Phases[phase], other))
	}
}

// worstPhase returns the phase of a rank that exceeds the median of all ranks by most, with this
// median.
func worstPhase(all []pace, rank int) (phase string, usual float64) {
	medians := map[string]float64{}
	for name := range all[rank].Phases {
		values := make([]float64, len(all))
		for i, p := range all {
			values[i] = p.Phases[name]
		}
		medians[name] = median(values)
	}
	over := func(name string) float64 { return all[rank].Phases[name] - medians[name] }
	names := slices.Sorted(maps.Keys(medians))
	phase = slices.MaxFunc(names, func(a, b string) int { return cmp.Compare(over(a), over(b)) })
	return phase, medians[phase]
}

// median sorts x and returns the middle, the lower one of two.
func median(x []float64) float64 {
	slices.Sort(x)
	return x[(len(x)-1)/2]
}
