package train

import (
	"time"

	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/model"
)

// Setup is the input of New. A trainer does not change it.
type Setup struct {
	Device      device.Device
	Mesh        *comm.Mesh
	Model       *model.Model
	Weights     Weights // with their values
	Optimizer   *OptimizerConfig
	Data        Data
	Memory      Memory
	Loop        Loop
	Seed        uint64       // of dropout
	Checkpoints *Checkpoints // nil = the run cannot be stopped and resumed
	Track       *Track       // nil = evaluations are not compared
	Clock       *clock.Clock
	Trace       *Trace            // the steps to record; nil = none
	Extra       []model.Component // memory of this rank for other purposes, which the plan includes
	Hooks       Hooks
}

// Data is the data of a run.
type Data struct {
	Train  *data.Set // nil for an evaluation
	Evals  []data.NamedSet
	Config *data.Config
}

// Memory limits the planner's choice.
type Memory struct {
	Config   MemoryConfig // the zero value is "auto" everywhere
	FreeHost int64        // bytes of the host's memory that this rank may use; 0 = unknown
	PerNode  int          // ranks that share the host's memory, for messages; 0 = 1
	Stage    int          // parallel.zero, for messages
}

// Loop says which steps to run.
type Loop struct {
	Steps     int64  // optimizer steps of the whole run
	EvalEvery int64  // optimizer steps between evaluations; 0 = only after the last step
	OnNaN     string // "stop" or "skip"
	Resumed   int64  // steps that earlier runs have done
	Updates   int64  // the number of these steps in which the optimizer updated the weights
	// the stages of the run, of which the last one is current; nil = one, from step 0 on
	Stages []Stage
	// the comparison of evaluations by earlier runs; nil = a new one begins
	Best *checkpoint.Best
}

// Hooks are functions that a trainer calls on every rank, between steps. Each may be nil.
type Hooks struct {
	// Step is called with the record of each step. An error ends the run.
	Step func(*Record) error
	// Eval is called with the record of each evaluation. An error ends the run.
	Eval func(*EvalRecord) error
	// Skipped is called when the run leaves out a step for the first time. why names the tensor in
	// which NaN or Inf was first seen.
	Skipped func(why string)
	// Stop is called after each step and returns whether this rank must stop.
	Stop func() bool
	// Unsaved is called when a checkpoint could not be written and the run continues. nil: the run
	// ends with the error.
	Unsaved func(err error)
	// Saved is called when a checkpoint is complete, with the time since it was begun.
	Saved func(took time.Duration)
	// Left is called on rank 0 when a checkpoint is complete and an old one cannot be removed. nil:
	// this is not reported.
	Left func(err error)
	// Tokens is called after each pass of a step or an evaluation with the results of this rank's
	// tokens, which are copied to the host.
	Tokens func([]TokenResult) error
	// Logits says that the results have logits, which take 4 bytes for each token and id of the
	// vocabulary.
	Logits bool
	// Probe is called between the passes and the reduction of each step, counted from 1. Tests use
	// it to let a rank fail.
	Probe func(step int64) error
}

// MaxTokens returns the largest number of tokens of a micro-batch, also of evaluations, and of a
// rank's shard of it.
func (s *Setup) MaxTokens() (microBatch, shard int64) {
	microBatch = max(s.trainTokens(), s.evalTokens())
	return microBatch, s.Model.MostTokens(microBatch)
}

// PassTokens returns the largest number of tokens of a micro-batch of a step, or of a pass if the
// job only evaluates.
func (s *Setup) PassTokens() int64 {
	if s.Data.Train == nil {
		return s.evalTokens()
	}
	return s.trainTokens()
}

func (s *Setup) trainTokens() int64 {
	x, budget := s.Data.Train, s.Data.Config.Budget
	switch {
	case x == nil:
		return 0
	case budget > 0:
		return min(budget, s.globalBatch()*x.Longest())
	}
	return s.Data.Config.Batch * x.Longest()
}

func (s *Setup) evalTokens() (most int64) {
	for _, x := range s.Data.Evals {
		most = max(most, s.evalBatch(x.Set)*x.Longest())
	}
	return most
}

// globalBatch returns the number of sequences of an optimizer step.
func (s *Setup) globalBatch() int64 {
	return int64(s.Mesh.Replicas) * s.Data.Config.Batch * s.Data.Config.Accumulate
}

// evalBatch returns the number of sequences of a set that a replica evaluates in one pass:
// data.batch, or the number of longest sequences that data.budget allows. It is 1 if RoPE depends
// on the longest document of a batch, so that the result does not depend on the mesh.
func (s *Setup) evalBatch(set *data.Set) int64 {
	if s.Model.Config.Switches() {
		return 1
	}
	if budget := s.Data.Config.Budget; budget > 0 {
		return min(max(1, budget/set.Longest()), set.Sequences())
	}
	return s.Data.Config.Batch
}

// inputBytes returns the bytes for the inputs of this rank's tokens.
func (s *Setup) inputBytes() (bytes int64) {
	_, shard := s.MaxTokens()
	for _, x := range new(tokenInputs).of(s.Model) {
		bytes = device.Padded(s.Device, bytes) + shard*x.dtype.Size()
	}
	return bytes
}
