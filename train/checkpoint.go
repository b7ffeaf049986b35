package train

import (
	"os"
	"path/filepath"
	"time"

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
	Every int64 // optimizer steps; 0 = only when the run is stopped
	Keep  int64 // number of checkpoints that are kept
	// Copy is "on" if checkpoints are written from a copy while steps run, and "off" if the run
	// waits for them. "auto" and "" leave it to the planner.
	Copy  string
	Stage Stage // of this run, without Step and First
	// Epochs says that the number of steps is that of so many epochs, which needs one stage.
	Epochs bool
	Best   bool              // keep also the checkpoint of the best evaluation (Setup.Track)
	Run    map[string]string // settings that a resumed run must have in common
	Base   string            // absolute path of the base model's folder; "" = a new model
	// Model writes the files of a model folder except the weights, for an export. It is called
	// while steps run.
	Model func(dir string) error
	// Changes describes how the model differs from that of a folder, see model.Config.Changes.
	Changes func(dir string) []string
	// Check returns an error if the run may no longer write to the folder. Rank 0 calls it before
	// each checkpoint; nil = no check.
	Check func() error
	// Accept lists the keys, such as optimizer.lr, that a resumed run may have changed.
	Accept []string

	// steps of checkpoints that are damaged or of another run; the next checkpoint replaces them
	replaced []int64
}

// Keys of Checkpoints.Run about parameters that are not trained: the patterns of train.freeze, the
// fingerprint of the folder that the frozen weights come from, and the settings of adapters.
const (
	FreezeKey = "train.freeze"
	FrozenKey = "frozen weights of model.path"
	LoRAKey   = "lora"
)

// tensorsOf lists the parameters of a group for a manifest.
func tensorsOf(g *model.Group) (all []checkpoint.Tensor) {
	for _, p := range g.Params {
		all = append(all, checkpoint.Tensor{Name: p.Name, Shape: p.Shape, DType: p.Stored().String()})
	}
	return all
}

// groupsOf returns groups to compare with a checkpoint. A group without parameters is left out.
func groupsOf(groups []*model.Group) []checkpoint.Group {
	var all []checkpoint.Group
	for _, g := range groups {
		if len(g.Params) > 0 {
			all = append(all, checkpoint.Group{Name: g.Name, Tensors: tensorsOf(g)})
		}
	}
	return all
}

// shardsOf returns the trained portions for a manifest, with the elements that each rank of the
// world writes. A portion is sharded over all ranks, or over those that have its experts.
func shardsOf(portions []model.Portion, mesh *comm.Mesh) (all []checkpoint.Group) {
	for _, x := range portions {
		if x.Frozen {
			continue
		}
		group, end := checkpoint.Group{Name: x.Name, Tensors: tensorsOf(x.Group)}, int64(0)
		for r := range mesh.World.Size() {
			lo, hi := end, end
			if x.Shard == model.AllRanks {
				lo, hi = comm.Shard(x.Numel(), mesh.World.Size(), r)
			} else if n := mesh.Expert.Size(); r%n == x.Shard {
				lo, hi = comm.Shard(x.Numel(), mesh.ExpertData.Size(), r/n)
			}
			group.Ranges, end = append(group.Ranges, []int64{lo, hi}), hi
		}
		all = append(all, group)
	}
	return all
}

// biasesOf returns the biases of the experts in a checkpoint.
func biasesOf(from *checkpoint.Checkpoint) (all []model.BiasTensor) {
	for _, b := range from.Biases {
		all = append(all, model.BiasTensor(b))
	}
	return all
}

// frozenOf lists the frozen parameters for a manifest.
func frozenOf(groups []*model.Group) (all []checkpoint.Tensor) {
	for _, g := range groups {
		all = append(all, tensorsOf(g.Half(true))...)
	}
	return all
}

// Steps returns the steps of the checkpoints in the folder in increasing order.
func (c *Checkpoints) Steps() ([]int64, error) { return checkpoint.Dir(c.Dir).Steps() }

// Ready returns an error if checkpoints of steps after the given one cannot be written. It removes
// unfinished files of aborted runs. One rank calls it before the first step.
func (c *Checkpoints) Ready(after int64) error { return checkpoint.Dir(c.Dir).Ready(after) }

// Replace says that the run does not resume from a checkpoint in the folder: its first checkpoint
// replaces all that are there. Rank 0 calls it before the first step.
func (c *Checkpoints) Replace() (err error) {
	c.replaced, err = c.Steps()
	return err
}

// Newest returns the path of the newest complete checkpoint in a folder, and when it was written;
// "" if there is none, or if the folder cannot be read.
func Newest(dir string) (path string, written time.Time) {
	steps, err := checkpoint.Dir(dir).Steps()
	if err != nil || len(steps) == 0 {
		return "", written
	}
	path = checkpoint.Dir(dir).Path(steps[len(steps)-1])
	if info, err := os.Stat(filepath.Join(path, checkpoint.ManifestFile)); err == nil {
		written = info.ModTime()
	}
	return path, written
}

// fill reads the elements that this rank owns from a checkpoint: the first kinds of
// checkpoint.Kinds, without the parameters in skip.
func fill(from *checkpoint.Checkpoint, d device.Device, w Weights, kinds int, skip map[string]bool) error {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	buffer := make([]float32, 1<<18)
	for _, x := range w.Stored() {
		state, first := x.State, int64(0)
		for _, p := range x.Params {
			lo, hi := max(state.Lo, first), min(state.Hi, first+p.Numel())
			for kind := range kinds {
				if skip[p.Name] {
					break
				}
				for at := lo; at < hi; at += int64(len(buffer)) {
					values := buffer[:min(int64(len(buffer)), hi-at)]
					if err := from.Read(p.Name, kind, at-first, values); err != nil {
						return err
					}
					if err := device.CopyAnywhere(d, s, state.slice(kind, at, at+int64(len(values))),
						tensor.OfFloat32(values, int64(len(values)))); err != nil {
						return err
					}
					if err := s.Sync(); err != nil { // the next read overwrites the buffer
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
