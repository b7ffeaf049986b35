package plan

import (
	"fmt"

	"ulysses/gdn"
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
		if idle := (j.Mesh.Ulysses - heads) * j.Mesh.Replicas; idle > 0 && (found == nil || idle > found.idle) {
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

// onUlysses returns the job on the same ranks with another Ulysses degree.
func onUlysses(j *file.Job, degree int64) (*file.Job, error) {
	other := *j
	other.Parallel.Ulysses = degree
	return &other, other.Resolve(int(j.Mesh.World))
}

// better returns, of the meshes that give every rank a head, the one with the most planned tokens a
// second, and its speed relative to this job's mesh. The degree is 0 if no mesh is faster and fits.
func better(j *file.Job, m *Machine, x *subject, heads int64) (degree int64, times float64, err error) {
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
		return 0, 0, err
	}
	const most = 3 // meshes to plan, the nearest ones
	for u, tried := min(heads, j.Mesh.Ulysses-1), 0; u >= 1 && tried < most; u-- {
		if j.Mesh.World%u != 0 {
			continue
		}
		tried++
		other, err := onUlysses(j, u)
		if err != nil {
			continue // such as a global batch that these replicas cannot share
		}
		if r, err := rate(other); err == nil && r/now > max(times, 1) {
			degree, times = u, r/now
		}
	}
	return degree, times, nil
}

// warning returns the line on idle ranks with the better mesh. It looks for a mesh only if the
// machine's rates are known.
func (i *idleRanks) warning(j *file.Job, m *Machine, x *subject) string {
	fix := fmt.Sprintf("no other mesh of %d ranks that fits is expected to be faster: start %d ranks", j.Mesh.World, i.heads)
	if m == nil {
		fix = fmt.Sprintf("set parallel.ulysses = %d or less", i.heads)
	} else if degree, times, err := better(j, m, x, i.heads); err == nil && degree > 0 {
		fix = fmt.Sprintf("set parallel.ulysses = %d (%d replicas), which is expected to process %.1f times the tokens a second", degree, j.Mesh.World/degree, times)
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
