package train

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

// Evaluated describes the model of an evaluation, to compare it with a checkpoint.
type Evaluated struct {
	Run   map[string]string // ModelKey, SeedKey and, with adapters, LoRAKey, as in Checkpoints.Run
	Stage Stage             // Positions and Model
	// Frozen is the fingerprint of the base model, as under FrozenKey in Checkpoints.Run.
	Frozen string
	// Changes describes how the model differs from that of a folder, see model.Config.Changes.
	Changes func(dir string) []string
}

// LoadCheckpoint fills the weights of an evaluation from a checkpoint, or from the newest undamaged
// one in a folder of checkpoints, that any number of ranks wrote. Parameters that its run has not
// trained keep their values, which must equal the values of the base model. It needs no moments and
// does not compare data and settings. Collective; called before New.
func LoadCheckpoint(path string, e *Evaluated, d device.Device, world comm.Comm, w Weights,
	groups []*model.Group) (r Resumed, err error) {
	var paths []string
	if world.Rank() == 0 {
		paths, err = checkpoint.Find(path)
	}
	if err = comm.Agree(world, err); err != nil {
		return r, err
	}
	text, err := json.Marshal(paths)
	if err != nil {
		return r, status.Errorf(status.Internal, "train: %w", err)
	}
	if text, err = comm.BroadcastBytes(world, text, 0); err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &paths); err != nil {
		return r, status.Errorf(status.Internal, "train: %w", err)
	}
	var damage []string
	for _, p := range paths {
		from, notes, err := openWhole(p, world, func(from *checkpoint.Checkpoint) ([]string, error) {
			return e.compare(from, groups)
		})
		if from != nil {
			err = comm.Agree(world, fill(from, d, w, 1, frozenNames(from)))
			from.Close()
			for i := range damage {
				damage[i] = "skipped a damaged checkpoint: " + damage[i]
			}
			return Resumed{Path: p, Step: from.Step, Updates: from.Updates, Notes: append(damage, notes...),
				Biases: biasesOf(from)}, err
		}
		if _, ok := err.(*damaged); !ok || len(paths) == 1 {
			return r, err
		}
		damage = append(damage, err.Error())
	}
	return r, status.Errorf(status.InvalidConfig,
		"checkpoint.resume: no checkpoint in %s is whole:\n  %s\nname another folder", path,
		strings.Join(damage, "\n  "))
}

// frozenNames returns the names of the parameters that the run of a checkpoint has not trained.
func frozenNames(from *checkpoint.Checkpoint) map[string]bool {
	names := map[string]bool{}
	for _, t := range from.Frozen {
		names[t.Name] = true
	}
	return names
}

// compare refuses a checkpoint of another model, or of another base model.
func (e *Evaluated) compare(from *checkpoint.Checkpoint, groups []*model.Group) (notes []string, err error) {
	run := maps.Clone(from.Run)
	for _, key := range []string{ModelKey, LoRAKey} {
		delete(run, key)
		if value, ok := e.Run[key]; ok {
			run[key] = value
		}
	}
	if n := len(from.Stages); n > 0 && from.Stages[n-1].Model == e.Stage.Model {
		if was := from.Stages[n-1].Positions; was != e.Stage.Positions {
			notes = append(notes,
				fmt.Sprintf("the model has %s, and it had %s when checkpoint %s was written", e.Stage.Positions, was,
					from.Path))
		}
		run[ModelKey] = from.Run[ModelKey]
	}
	frozen := frozenNames(from)
	if len(frozen) > 0 {
		run[FrozenKey] = e.Frozen
		if from.Base == "" { // the frozen parameters were drawn
			run[SeedKey] = e.Run[SeedKey]
		}
	}
	trained := make([]*model.Group, len(groups))
	for i, g := range groups {
		trained[i] = &model.Group{Name: g.Name}
		for _, p := range g.Params {
			if !frozen[p.Name] {
				trained[i].Params = append(trained[i].Params, p)
			}
		}
	}
	if faults := differences(from, run, e.Changes, trained, 1); len(faults) > 0 {
		return nil, status.Errorf(status.InvalidConfig,
			"checkpoint %s is of another model: %s; name the job file, or the model, of its run", from.Path,
			strings.Join(faults, "; "))
	}
	return notes, nil
}
