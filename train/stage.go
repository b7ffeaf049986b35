package train

import (
	"fmt"
	"math/big"
	"slices"

	"ulysses/checkpoint"
	"ulysses/internal/units"
)

// Stage is a part of a run with sequences of one length. A resumed run begins another stage if
// Checkpoints.Accept lists the keys that have changed.
type Stage = checkpoint.Stage

// Keys of Checkpoints.Run and Checkpoints.Accept whose change begins a stage.
const (
	ModelKey       = "model"
	SequenceKey    = "data.sequence"
	FilesKey       = "data.path"
	GlobalBatchKey = "data.global_batch"
	SeedKey        = "seed"
	// BatchOfRun is the key of GlobalBatchKey in Checkpoints.Run.
	BatchOfRun = "global batch"
)

// first returns the number of the first sequence of step s in the training order.
func (l *Loop) first(s, globalBatch int64) int64 {
	if len(l.Stages) == 0 {
		return s * globalBatch
	}
	now := &l.Stages[len(l.Stages)-1]
	return now.First + (s-now.Step)*globalBatch
}

// stageChange says how the stage of a run differs from that of a checkpoint.
type stageChange struct {
	run       map[string]string // Checkpoints.Run, with the checkpoint's value where a stage may change it
	changed   []string          // a sentence for each change
	keys      []string          // the keys of the changes that Accept does not list
	positions []string          // the change of the model's positions
	files     bool              // the training files are others
	accepted  bool              // there are changes, and Accept lists all
	fault     string            // why there must not be another stage; "" = there may be
}

// change compares the stage of the run with that of a checkpoint.
func (c *Checkpoints) change(from *checkpoint.Checkpoint) (x stageChange) {
	x.run = map[string]string{}
	for key, value := range c.Run {
		x.run[key] = value
	}
	if len(from.Stages) == 0 { // an older program wrote it: any difference is a fault
		return x
	}
	was, now := &from.Stages[len(from.Stages)-1], &c.Stage
	stays := func(key string) {
		if before, ok := from.Run[key]; ok {
			x.run[key] = before
		}
	}
	note := func(key, format string, args ...any) {
		x.changed = append(x.changed, fmt.Sprintf(format, args...))
		if !slices.Contains(c.Accept, key) && !slices.Contains(x.keys, key) {
			x.keys = append(x.keys, key)
		}
	}
	if was.Sequence != now.Sequence {
		note(SequenceKey, "data.sequence is %d, it was %d", now.Sequence, was.Sequence)
		stays(SequenceKey)
	}
	if was.Positions != now.Positions && was.Model == now.Model {
		note(SequenceKey, "the model has %s, it had %s", now.Positions, was.Positions)
		x.positions = x.changed[len(x.changed)-1:]
		stays(ModelKey)
	}
	if was.GlobalBatch != now.GlobalBatch {
		note(GlobalBatchKey, "a step has %s, it had %d", units.Count(now.GlobalBatch, "sequence"), was.GlobalBatch)
		stays(BatchOfRun)
	}
	switch x.files = was.Files != now.Files; {
	case was.Tokenizer != now.Tokenizer: // token ids have other meanings: Run has the fault
	case !x.files && was.Conversations != "" && was.Conversations != now.Conversations:
		// the same files give other texts or labels: Run has the fault
	case x.files:
		note(FilesKey, "data.path is %s, it was %s", now.Files, was.Files)
		stays(FilesKey)
	case was.Sequence != now.Sequence: // the same files make other sequences
		stays(FilesKey)
	}
	x.accepted = len(x.changed) > 0 && len(x.keys) == 0
	if c.Epochs && (x.accepted || len(from.Stages) > 1) {
		x.fault = "train.epochs counts passes over the sequences of one length, and the run has several stages; set train.steps to the steps of the whole run"
	}
	return x
}

// stages returns the stages of the run that resumes from a checkpoint with which it has been
// compared.
func (c *Checkpoints) stages(from *checkpoint.Checkpoint) []Stage {
	if len(from.Stages) == 0 {
		return []Stage{c.Stage}
	}
	was, now := from.Stages[len(from.Stages)-1], c.Stage
	if x := c.change(from); len(x.changed) == 0 {
		return from.Stages
	}
	now.Step = from.Step
	if was.Files == now.Files {
		now.First = scaled(was.First+(from.Step-was.Step)*was.GlobalBatch, now.Sequences, was.Sequences)
	}
	stages := from.Stages
	if was.Step == from.Step { // a stage without a step
		stages = stages[:len(stages)-1]
	}
	return append(slices.Clone(stages), now)
}

// scaled returns ⌈n·to/from⌉: the number of the first sequence that begins after n sequences, if an
// epoch has `to` sequences instead of `from`.
func scaled(n, to, from int64) int64 {
	x := new(big.Int).Mul(big.NewInt(n), big.NewInt(to))
	x.Add(x, big.NewInt(from-1))
	return x.Div(x, big.NewInt(from)).Int64()
}

// position describes where the data of a new stage begin.
func position(s *Stage, files bool) string {
	if files {
		return "the data begin with the first sequence of the new files"
	}
	return fmt.Sprintf("the data go on after the same share of the epoch, with sequence %d of %d of epoch %d",
		s.First%s.Sequences+1, s.Sequences, s.First/s.Sequences+1)
}
