package train

import (
	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Checkpoints says where and when a run writes checkpoints.
type Checkpoints struct {
	Dir   string
	Every int64             // optimizer steps; 0 = only when the run is stopped
	Keep  int64             // how many of the newest stay
	Run   map[string]string // the settings that a resumed run must have in common
	Base  string            // absolute path of the base model's folder; "" = a new model
	// Model writes the files of a model folder except the weights, for an export. It is called
	// while steps run.
	Model func(dir string) error
	// Check returns an error if the folder must not be written any more. Rank 0 calls it before
	// each checkpoint; nil = no check.
	Check func() error
	// Accept lists the keys, such as optimizer.lr, that a resumed run may have changed.
	Accept []string

	skipped []int64 // steps of damaged checkpoints; the next checkpoint replaces them
}

// groupsOf describes the parameters for a manifest, sharded over the given number of ranks.
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

// Steps returns the steps of the checkpoints in the folder, the newest last.
func (c *Checkpoints) Steps() ([]int64, error) { return checkpoint.Dir(c.Dir).Steps() }

// Ready returns an error if checkpoints cannot be written, before any step is run. It removes what
// aborted runs have left. One rank calls it.
func (c *Checkpoints) Ready() error { return checkpoint.Dir(c.Dir).Ready() }

// fill reads the elements that this rank owns from a checkpoint.
func fill(from *checkpoint.Checkpoint, d device.Device, w Weights, groups []*model.Group, parts int) error {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	buffer := make([]float32, 1<<18)
	for i, g := range groups {
		state, first := w.State(i), int64(0)
		for _, p := range g.Params {
			lo, hi := max(state.Lo, first), min(state.Hi, first+p.Numel())
			for part := range parts {
				for at := lo; at < hi; at += int64(len(buffer)) {
					values := buffer[:min(int64(len(buffer)), hi-at)]
					if err := from.Read(p.Name, part, at-first, values); err != nil {
						return err
					}
					if err := d.Copy(s, state.slice(part, at, at+int64(len(values))), tensor.OfFloat32(values, int64(len(values)))); err != nil {
						return err
					}
					if err := s.Sync(); err != nil { // before the buffer is filled again
						return err
					}
				}
			}
			first += p.Numel()
		}
		if !state.Compute.IsNil() && state.Hi > state.Lo {
			if err := d.Copy(s, state.Compute, state.Master); err != nil {
				return err
			}
		}
	}
	if err := s.Sync(); err != nil {
		return status.Errorf(status.Of(err), "train: resume: %w", err)
	}
	return nil
}
