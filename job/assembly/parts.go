// Package assembly makes what a job of kind "train" or "eval" consists of: the model, the storage
// of its weights and the trainer's setup. A run and a plan assemble the same Parts, the plan on a
// device that computes nothing. The package also prints the tables of planned memory.
package assembly

import (
	"cmp"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/clock"
	"ulysses/job/file"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// Parts has the parts of a job of kind "train" or "eval" on one rank. The caller sets the first
// group of fields; Layout sets the second. Free frees the second group.
type Parts struct {
	Job      *file.Job
	Device   device.Device
	Mesh     *comm.Mesh
	Clock    *clock.Clock
	Compute  tensor.DType // of activations, and of the weights in matrix products
	FreeHost int64        // bytes of host memory that this rank may allocate; 0 = unknown
	Config   *model.Config

	Levels  string // how all-to-alls are made, if that is a choice; see comm.Mesh.SetLevels
	Model   *model.Model
	Weights train.Weights
}

// Layout makes the model and allocates its weights, without values. Collective over the sequence
// axis.
func (p *Parts) Layout() error {
	j := p.Job
	strategy, err := gdn.ParseStrategy(j.GDN.Strategy)
	if err != nil {
		return err
	}
	rows := j.Data.Batch * j.Data.Sequence / int64(p.Mesh.Seq.Size())
	row := (p.Config.NumAttentionHeads + 2*p.Config.NumKeyValueHeads) * p.Config.HeadDim * p.Compute.Size()
	if p.Levels, err = p.Mesh.SetLevels(j.Parallel.TwoLevel, rows*row); err != nil {
		return err
	}
	// On the CPU, the ranks that move bytes and the kernels share cores.
	overlap := j.Parallel.Overlap == "on" || j.Parallel.Overlap == "auto" && p.Device.Info().Place != tensor.Host
	p.Model, err = model.New(p.Device, p.Mesh.Seq, p.Config, model.Options{Compute: p.Compute, Strategy: strategy, Tokens: cmp.Or(j.Data.Budget, j.Data.Batch*j.Data.Sequence),
		Ring: int64(p.Mesh.Ring), Gather: j.Mesh.Gather, Overlap: overlap})
	if err != nil {
		return err
	}
	if err = p.Model.SetTiles(j.Tile.Tiles()); err != nil {
		return err
	}
	var opt *train.OptimizerConfig
	if j.Kind == "train" {
		opt = &j.Optimizer
	}
	p.Weights, err = train.NewWeights(p.Device, p.Mesh.World, p.Model.Groups(), p.Compute, opt, int(j.Parallel.Zero), p.offload())
	return err
}

// offload says where the optimizer's states are.
func (p *Parts) offload() train.Offload {
	x := train.Offload{FreeHost: p.FreeHost}
	if p.Job.Memory.Optimizer == "offload" {
		x.Step = train.StepStreamed
	}
	return x
}

// Setup returns the trainer's setup as the job file determines it, without data.
func (p *Parts) Setup() *train.Setup {
	j := p.Job
	return &train.Setup{Device: p.Device, Mesh: p.Mesh, Model: p.Model, Weights: p.Weights, Optimizer: &j.Optimizer, Clock: p.Clock,
		Data: train.Data{Config: &j.Data}, Memory: train.Memory{Config: j.Memory, FreeHost: p.FreeHost},
		Seed: uint64(j.Seed), Loop: train.Loop{EvalEvery: j.Eval.Every, OnNaN: j.Train.OnNaN}}
}

// Free frees the weights and the model.
func (p *Parts) Free() {
	if p.Weights != nil {
		p.Weights.Free()
	}
	if p.Model != nil {
		p.Model.Close()
	}
}
