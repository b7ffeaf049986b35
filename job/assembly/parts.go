// Package assembly makes what a job of kind "train" or "eval" consists of: the model, the storage
// of its weights and the trainer's setup. A run and a plan assemble the same Parts, the plan on a
// device that computes nothing. The package also prints the tables of planned memory.
package assembly

import (
	"cmp"
	"fmt"

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
	PerNode  int          // ranks of this rank's node
	Config   *model.Config
	Rates    train.StepRates          // choose where the step of an offloaded optimizer runs
	OpenHost func() (HostStep, error) // opens the CPU threads for a step on the host

	Levels  string // how all-to-alls are made, if that is a choice; see comm.Mesh.SetLevels
	Model   *model.Model
	Weights train.Weights
	host    HostStep // nil = the step does not run on the host
	step    string   // where the optimizer's step runs, if its states are in host memory
}

// HostStep runs optimizer steps in host memory.
type HostStep interface {
	train.Stepper
	Close()
}

// Layout makes the model and allocates its weights, without values. Collective.
func (p *Parts) Layout() error {
	j := p.Job
	strategy, err := gdn.ParseStrategy(j.GDN.Strategy)
	if err != nil {
		return err
	}
	rows := j.Data.Batch * j.Data.Sequence / int64(p.Mesh.Seq.Size())
	row := p.Config.HeadFeatures() * p.Compute.Size()
	if p.Levels, err = p.Mesh.SetLevels(j.Parallel.TwoLevel, rows*row); err != nil {
		return err
	}
	var opt *train.OptimizerConfig
	var freeze []string
	if j.Kind == "train" {
		opt, freeze = &j.Optimizer, j.Train.Freeze
	}
	// On the CPU, the ranks that move bytes and the kernels share cores.
	overlap := j.Parallel.Overlap == "on" || j.Parallel.Overlap == "auto" && p.Device.Info().Place != tensor.Host
	p.Model, err = model.New(p.Device, p.Mesh.Seq, p.Config,
		model.Options{Compute: p.Compute, Strategy: strategy,
			Tokens: cmp.Or(j.Data.Budget, j.Data.Batch*j.Data.Sequence), Ring: int64(p.Mesh.Ring),
			Gather: j.Mesh.Gather, Overlap: overlap, Freeze: freeze, LoRA: j.Adapters(),
			Experts:    p.Mesh.ExpertRanks(),
			MoveBiases: j.Kind == "train" && j.Optimizer.ExpertBiasRate > 0})
	if err != nil {
		return err
	}
	if err = p.Model.SetTiles(j.Tile.Tiles()); err != nil {
		return err
	}
	offload, err := p.offload()
	if err = comm.Agree(p.Mesh.World, err); err != nil {
		return err
	}
	p.Weights, err = train.NewWeights(p.Device, p.Mesh, p.Model.Groups(), p.Compute, opt, int(j.Parallel.Zero), offload)
	return err
}

// offload says where the optimizer's states are and where its step runs. All ranks choose alike:
// the step runs on the host if that is expected to be faster on a rank. Collective.
func (p *Parts) offload() (train.Offload, error) {
	x, j := train.Offload{FreeHost: p.FreeHost, PerNode: p.PerNode}, p.Job
	m := &j.Memory
	switch {
	case j.Kind != "train" || !m.OffloadsOptimizer():
		return x, nil
	case p.Device.Info().Place == tensor.Host:
		x.Step = train.StepStreamed // NewWeights refuses it
		return x, nil
	}
	x.Gradients = m.Gradients == "offload"
	step := []int64{int64(train.StepStreamed)}
	switch m.Optimizer {
	case "host":
		step[0] = int64(train.StepOnHost)
	case "offload":
		step[0] = int64(p.Rates.FasterStep(&j.Optimizer, p.Compute, x.Gradients))
		if err := p.Mesh.World.AllReduce(nil, tensor.OfInt64(step, 1), comm.Max); err != nil {
			return x, err
		}
	}
	x.Step = train.OptimizerStep(step[0])
	p.step = p.describeStep(&x)
	if x.Step != train.StepOnHost {
		return x, nil
	}
	var err error
	p.host, err = p.OpenHost()
	x.Host = p.host
	return x, err
}

// describeStep returns where the optimizer's step runs, with the expected time of both ways.
func (p *Parts) describeStep(x *train.Offload) string {
	n := p.Model.Trained()
	if p.Job.Parallel.Zero > 0 {
		n /= int64(p.Mesh.World.Size())
	}
	seconds := func(step train.OptimizerStep) float64 {
		return p.Rates.StepSeconds(step, &p.Job.Optimizer, p.Compute, x.Gradients, n)
	}
	here, there := seconds(train.StepStreamed), seconds(train.StepOnHost)
	if x.Step == train.StepOnHost {
		return fmt.Sprintf("on the host, expected %.3g s; streamed through the device %.3g s", there, here)
	}
	return fmt.Sprintf("streamed through the device, expected %.3g s; on the host %.3g s", here, there)
}

// Setup returns the trainer's setup as the job file determines it, without data.
func (p *Parts) Setup() *train.Setup {
	j := p.Job
	return &train.Setup{Device: p.Device, Mesh: p.Mesh, Model: p.Model, Weights: p.Weights, Optimizer: &j.Optimizer,
		Clock: p.Clock, Data: train.Data{Config: &j.Data},
		Memory: train.Memory{Config: j.Memory, FreeHost: p.FreeHost, PerNode: p.PerNode, Stage: int(j.Parallel.Zero)},
		Seed:   uint64(j.Seed), Loop: train.Loop{EvalEvery: j.Eval.Every, OnNaN: j.Train.OnNaN}}
}

// Free frees the weights and the model.
func (p *Parts) Free() {
	if p.Weights != nil {
		p.Weights.Free()
	}
	if p.host != nil {
		p.host.Close()
	}
	if p.Model != nil {
		p.Model.Close()
	}
}
