package plan

import (
	"fmt"

	"ulysses/gdn"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/model"
)

// idleRanks describes the ranks of a sequence that have no head of some kind of layer.
type idleRanks struct {
	idle  int64 // ranks without a head
	heads int64 // heads of the kind of layer
	what  string
	which string // "heads" or "value heads"
}

// findIdleRanks returns the kind of layer for which the most ranks of the mesh have no head; nil if
// every rank has one. linear is the plan of the linear layers.
func findIdleRanks(j *file.Job, c *model.Config, linear *gdn.Plan) (found *idleRanks) {
	look := func(heads int64, what, which string) {
		if idle := (j.Mesh.Ulysses - heads) * j.Mesh.Ring * j.Mesh.Replicas; idle > 0 && (found == nil || idle > found.idle) {
			found = &idleRanks{idle, heads, what, which}
		}
	}
	if c.LinearLayers() < c.NumHiddenLayers {
		look(c.NumAttentionHeads, "attention", "heads")
	}
	if linear != nil && linear.Layer().Strategy == gdn.Heads {
		look(c.LinearNumValueHeads, "linear attention", "value heads")
	}
	return found
}

// onMesh returns the job on the same ranks with other degrees.
func onMesh(j *file.Job, ulysses, ring int64) (*file.Job, error) {
	other := *j
	other.Parallel.Ulysses, other.Parallel.Ring = ulysses, ring
	return &other, other.Resolve(int(j.Mesh.World))
}

// better returns, of the meshes that give every rank a head, the one with the most planned tokens a
// second, and its speed relative to this job's mesh: with a ring and as many replicas, or without a
// ring. It is nil if no mesh is faster and fits.
func better(j *file.Job, m *Machine, x *subject, heads int64) (mesh *file.Mesh, times float64, err error) {
	rate := func(j *file.Job) (float64, error) {
		f, err := Predict(j, m, x, true)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		return float64(f.tokens) / f.Seconds, nil
	}
	now, err := rate(j)
	if err != nil {
		return nil, 0, err
	}
	const most = 3 // meshes of each kind to plan, the nearest ones
	for _, withRing := range []bool{true, false} {
		of := j.Mesh.World
		if withRing {
			if of = j.Mesh.Ulysses * j.Mesh.Ring; !ringRuns(m, x.config) {
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
			if r, err := rate(other); err == nil && r/now > least {
				mesh, times = &other.Mesh, r/now
			}
		}
	}
	return mesh, times, nil
}

// warning returns the line on idle ranks with the better mesh. It looks for a mesh only if the
// machine's rates are known.
func (i *idleRanks) warning(j *file.Job, m *Machine, x *subject) string {
	fix := fmt.Sprintf("no other mesh of %d ranks that fits is expected to be faster: start %d ranks", j.Mesh.World, i.heads)
	if m == nil {
		fix = fmt.Sprintf("set parallel.ulysses = %d or less", i.heads)
	} else if mesh, times, err := better(j, m, x, i.heads); err == nil && mesh != nil {
		ring := ""
		if mesh.Ring > 1 {
			ring = fmt.Sprintf(" and parallel.ring = %d", mesh.Ring)
		}
		fix = fmt.Sprintf("set parallel.ulysses = %d%s (%s), which is expected to process %.1f times the tokens a second",
			mesh.Ulysses, ring, units.Count(mesh.Replicas, "replica"), times)
	}
	return fmt.Sprintf("%v: parallel.ulysses = %d: %d of %d ranks compute no %s, because the model has %d %s; %s",
		j.Origin("parallel.ulysses"), j.Parallel.Ulysses, i.idle, j.Mesh.World, i.what, i.heads, i.which, fix)
}

// WarnIdleRanks returns the warning of a run with ranks that have no head, on rank 0 before the
// first step, otherwise "". On a CPU, whose rates are measured, it takes half a second; it takes no
// time if every rank has a head.
func (r *Rank) WarnIdleRanks() string {
	i := findIdleRanks(r.Job, r.Config, r.Model.Linear())
	if i == nil || r.Mesh.World.Rank() > 0 {
		return ""
	}
	x := SubjectOfModel(r.Config)
	m, err := r.machine(x)
	if err != nil || m.ready() != nil {
		m = nil
	}
	return i.warning(r.Job, m, x)
}
