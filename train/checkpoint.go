package train

import (
	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Checkpoints is where a run keeps its states, and when.
type Checkpoints struct {
	Dir   string
	Every int64 // optimizer steps; 0 = only when the run is stopped
	Keep  int64
	Run   map[string]string // what a run that resumes must have in common
	Base  string            // absolute path of the base model's folder; "" = a new model
	// Model writes what a model's folder has beside the weights, for an export. It is called while
	// steps run.
	Model func(dir string) error
	// Check returns an error if the folder must not be written any more. Rank 0 calls it before
	// each checkpoint; nil = no check.
	Check func() error
	// Accept lists the keys, such as optimizer.lr, that a resumed run may have changed.
	Accept []string

	skipped []int64 // steps of damaged checkpoints; the next checkpoint replaces them
}

// State is what a rank keeps of a group's elements [Lo, Hi): exact weights, F32; their copies of
// the compute type, if that is another; the optimizer's moments, if it has any. All flat.
type State struct {
	Lo, Hi           int64
	Exact, Low, M, V tensor.Tensor
}

// part views elements [lo, hi) of the group in one of them; nil where there is none.
func (x *State) part(i int, lo, hi int64) tensor.Tensor {
	t := [...]tensor.Tensor{x.Exact, x.M, x.V}[i]
	if t.IsNil() {
		return t
	}
	return t.Slice(0, lo-x.Lo, hi-x.Lo)
}

// parts is how many of checkpoint.Parts an optimizer needs.
func (o *OptimizerConfig) parts() int {
	if o.Name == "adamw" {
		return 3
	}
	return 1
}

// groupsOf describes the parameters for a manifest, cut over so many ranks.
func groupsOf(groups []*model.Group, ranks int) []checkpoint.Group {
	all := make([]checkpoint.Group, len(groups))
	for i, g := range groups {
		all[i].Name = g.Name
		for _, p := range g.Params {
			all[i].Tensors = append(all[i].Tensors, checkpoint.Tensor{Name: p.Name, Shape: p.Shape, DType: p.Stored().String()})
		}
		for r := range ranks {
			lo, hi := comm.Shard(g.Numel(), ranks, r)
			all[i].Cut = append(all[i].Cut, []int64{lo, hi})
		}
	}
	return all
}

// Steps lists the steps of the checkpoints that are in the folder, the newest last.
func (c *Checkpoints) Steps() ([]int64, error) { return checkpoint.Dir(c.Dir).Steps() }

// Ready looks whether states can be written, so that a folder that cannot costs nothing, and takes
// away what runs that were ended have left. One rank calls it, before the first step.
func (c *Checkpoints) Ready() error { return checkpoint.Dir(c.Dir).Ready() }

// fill reads what this rank keeps.
func fill(from *checkpoint.Checkpoint, d device.Device, w Weights, groups []*model.Group, parts int) error {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	piece := make([]float32, 1<<18)
	for i, g := range groups {
		state, first := w.State(i), int64(0)
		for _, p := range g.Params {
			lo, hi := max(state.Lo, first), min(state.Hi, first+p.Numel())
			for part := range parts {
				for at := lo; at < hi; at += int64(len(piece)) {
					values := piece[:min(int64(len(piece)), hi-at)]
					if err := from.Read(p.Name, part, at-first, values); err != nil {
						return err
					}
					if err := d.Copy(s, state.part(part, at, at+int64(len(values))), tensor.OfFloat32(values, int64(len(values)))); err != nil {
						return err
					}
					if err := s.Sync(); err != nil { // the piece is used again
						return err
					}
				}
			}
			first += p.Numel()
		}
		if !state.Low.IsNil() && state.Hi > state.Lo {
			if err := d.Copy(s, state.Low, state.Exact); err != nil {
				return err
			}
		}
	}
	if err := s.Sync(); err != nil {
		return status.Errorf(status.Of(err), "train: resume: %w", err)
	}
	return nil
}
