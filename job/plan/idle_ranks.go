package plan

import (
	"fmt"

	"ulysses/gdn"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/job/operator"
)

// idleRanks describes the ranks of a sequence that have no head of some kind of layer.
type idleRanks struct {
	idle  int64 // ranks without a head
	heads int64 // heads of the kind of layer
	what  string
	which string // "head" or "value head"
}

// kindOfHeads is a kind of layer whose heads are shared by the ranks of a group.
type kindOfHeads struct {
	heads int64
	what  string
	which string
}

// sharedHeads returns the kinds of layers whose heads the ranks share. linear is the plan of the
// linear layers of a model; nil = there is none. byHeads says that an operator job shares heads.
func (x *subject) sharedHeads(linear *gdn.Plan, byHeads bool) (all []kindOfHeads) {
	if x.attention.Heads > 0 {
		all = append(all, kindOfHeads{x.attention.Heads, "attention", "head"})
	}
	rule := linear != nil && linear.Layer().Strategy == gdn.Heads // by heads
	if x.config == nil {
		rule = byHeads && x.attention.Heads == 0
	}
	if rule {
		all = append(all, kindOfHeads{x.Heads[len(x.Heads)-1][0], "linear attention", "value head"})
	}
	return all
}

// findIdleRanks returns the kind of layer for which the most ranks of the mesh have no head; nil if
// every rank has one.
func findIdleRanks(j *file.Job, kinds []kindOfHeads) (found *idleRanks) {
	for _, k := range kinds {
		if idle := (j.Mesh.Ulysses - k.heads) * j.Mesh.Ring * j.Mesh.Replicas; idle > 0 &&
			(found == nil || idle > found.idle) {
			found = &idleRanks{idle, k.heads, k.what, k.which}
		}
	}
	return found
}

// onMesh returns the job on the same ranks with other degrees.
func onMesh(j *file.Job, ulysses, ring int64) (*file.Job, error) {
	other := *j
	other.Parallel.Ulysses, other.Parallel.Ring = ulysses, ring
	return &other, other.Resolve(int(j.Mesh.World))
}

// rate returns the planned tokens of a second.
func rate(j *file.Job, m *Machine, x *subject) (float64, error) {
	f, err := Predict(j, m, x, true)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return float64(f.tokens) / f.Seconds, nil
}

// better returns, of the meshes that give every rank a head, the one with the most planned tokens a
// second, and its speed relative to this job's mesh: with a ring and as many replicas, or without a
// ring. It is nil if no mesh is faster and fits.
func better(j *file.Job, m *Machine, x *subject, heads int64) (mesh *file.Mesh, times float64, err error) {
	now, err := rate(j, m, x)
	if err != nil {
		return nil, 0, err
	}
	const most = 3 // meshes of each kind to plan, the nearest ones
	for _, withRing := range []bool{true, false} {
		of := j.Mesh.World
		if withRing {
			if of = j.Mesh.Ulysses * j.Mesh.Ring; !ringRuns(m, x) {
				continue
			}
		}
		for u, tried := min(heads, j.Mesh.Ulysses-1), 0; u >= 1 && tried < most; u-- {
			if of%u != 0 {
				continue
			}
			tried++
			ring := int64(1)
			if withRing {
				ring = of / u
			}
			other, err := onMesh(j, u, ring)
			if err != nil {
				continue // such as a global batch that these replicas cannot share
			}
			least := max(times, 1) // a ring keeps the sequences of a step, so replicas must be faster
			if mesh != nil && mesh.Ring > 1 && !withRing {
				least = nearlyBest * times
			}
			r, err := rate(other, m, x)
			if err != nil && !isMisfit(err) {
				return nil, 0, err
			}
			if err == nil && r/now > least {
				mesh, times = &other.Mesh, r/now
			}
		}
	}
	return mesh, times, nil
}

// warning returns the line on idle ranks with the better mesh. It looks for a mesh only if the
// machine's rates are known.
func (i *idleRanks) warning(j *file.Job, m *Machine, x *subject) string {
	return fmt.Sprintf("%v: parallel.ulysses = %d: %d of %d ranks compute no %s, because the %s has %s; %s",
		j.Origin("parallel.ulysses"), j.Parallel.Ulysses, i.idle, j.Mesh.World, i.what,
		map[bool]string{true: "model", false: "input"}[x.config != nil], units.Count(i.heads, i.which), i.fix(j, m, x))
}

// fix returns what to set: a mesh that gives every rank a head, or the strategy of the gated delta
// rule that shares tokens.
func (i *idleRanks) fix(j *file.Job, m *Machine, x *subject) string {
	if j.Kind == "gdn" {
		return "set gdn.strategy = \"state\"" + i.byState(j, m, x)
	}
	least := fmt.Sprintf("set parallel.ulysses = %d or less", i.heads)
	if m == nil {
		return least
	}
	mesh, times, err := better(j, m, x, i.heads)
	if err != nil { // without a plan, nothing is known about other meshes
		return least
	}
	if mesh == nil {
		return fmt.Sprintf("no other mesh of %d ranks that fits is expected to be faster: start %d ranks",
			j.Mesh.World, i.heads)
	}
	ring := ""
	if mesh.Ring > 1 {
		ring = fmt.Sprintf(" and parallel.ring = %d", mesh.Ring)
	}
	return fmt.Sprintf("set parallel.ulysses = %d%s (%s), which is expected to process %.1f times the tokens a second",
		mesh.Ulysses, ring, units.Count(mesh.Replicas, "replica"), times)
}

// byState returns the planned speed of the strategy that shares tokens.
func (i *idleRanks) byState(j *file.Job, m *Machine, x *subject) string {
	other := *j
	other.GDN.Strategy = "state"
	if m == nil {
		return ""
	}
	now, err := rate(j, m, x)
	if err != nil {
		return ""
	}
	then, err := rate(&other, m, x)
	if err != nil {
		return ""
	}
	return fmt.Sprintf(", which is expected to process %.1f times the tokens a second", then/now)
}

// WarnIdleRanks returns the warning of a run with ranks that have no head, on rank 0 before the
// first step, otherwise "". run is the opened operator job; nil = the job has a model. On a CPU,
// whose rates are measured, it takes half a second; it takes no time if every rank has a head.
func (r *Rank) WarnIdleRanks(run *operator.Run) string {
	if r.Mesh.World.Rank() > 0 {
		return ""
	}
	var linear *gdn.Plan
	var x *subject
	if run != nil {
		var err error
		if x, err = SubjectOf(r.Job); err != nil {
			return "" // the run reports it
		}
	} else {
		x, linear = SubjectOfModel(r.Config), r.Model.Linear()
	}
	i := findIdleRanks(r.Job, x.sharedHeads(linear, run != nil && run.SharesHeads()))
	if i == nil {
		return ""
	}
	m, err := r.machine(x)
	if err != nil || m.ready() != nil {
		m = nil
	}
	return i.warning(r.Job, m, x)
}
