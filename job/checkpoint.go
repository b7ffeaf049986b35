package job

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"ulysses/data"
	"ulysses/internal/outdir"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/train"
)

// checkpoints returns the checkpoints of the run, with the settings that a resumed run must have in
// common with it.
func (s *session) checkpoints() *train.Checkpoints {
	j := s.Job
	base := j.Model.Path
	if abs, err := filepath.Abs(base); base != "" && err == nil {
		base = abs
	}
	rest := func(dir string) error { return s.parts.Model.SaveRest(dir, s.companions()) }
	c := &train.Checkpoints{Dir: j.CheckpointDir(), Every: j.Checkpoint.Every, Keep: j.Checkpoint.Keep,
		Copy: j.Checkpoint.Copy, Best: j.Checkpoint.Best, Model: rest, Changes: s.parts.Config.Changes, Base: base,
		Accept: j.Checkpoint.Accept, Stage: s.stage(), Epochs: j.Train.Epochs > 0, Run: map[string]string{
			train.ModelKey:    digest(s.parts.Config),
			"optimizer.name":  j.Optimizer.Name,
			train.BatchOfRun:  fmt.Sprint(j.Mesh.GlobalBatch),
			train.SequenceKey: fmt.Sprint(j.Data.Sequence),
			"data.pack":       fmt.Sprint(j.Data.Pack),
			"data.shuffle":    fmt.Sprint(j.Data.Shuffle),
			train.SeedKey:     fmt.Sprint(j.Seed),
			train.FilesKey:    fmt.Sprintf("%s, in %s%s", s.data.Train().Identity(), s.dataNames(), s.data.Tokenizer()),
		}}
	if j.Data.Pack && j.Data.Packing != data.Split {
		c.Run["data.packing"] = j.Data.Packing
	}
	if l := j.Adapters(); l != nil {
		c.Run[train.LoRAKey] = adaptersText(l)
	}
	if len(j.Train.Freeze) > 0 {
		c.Run[train.FreezeKey] = fmt.Sprintf("%q", j.Train.Freeze)
	}
	if s.hasFrozen() {
		c.Run[train.FrozenKey] = s.frozen
	}
	return c
}

// companions names the files that are saved beside the weights. A tokenizer or chat templates that
// the job names are saved, and not the files of model.path: the model has been trained with them.
// The model is saved without a file that somebody has removed since.
func (s *session) companions() (x model.Source) {
	lost := func(err error) { s.Log.Warn().Msgf("%v; the model is saved without it", err) }
	j := s.Job
	x.Base = j.Model.Path
	var err error
	if x.Templates, err = data.ChatTemplates(j.Data); err != nil {
		lost(err)
	}
	path := data.TokenizerPath(j.Data.Tokenizer)
	if path == "" {
		return x
	}
	used, err := os.Stat(path)
	if err != nil {
		lost(fmt.Errorf("data.tokenizer: %w", err))
	}
	own, missing := os.Stat(filepath.Join(x.Base, filepath.Base(path)))
	if err != nil || missing != nil || x.Base == "" || !os.SameFile(used, own) {
		x.Tokenizer = path
	}
	return x
}

// hasFrozen reports whether parameters are not trained.
func (s *session) hasFrozen() bool {
	return slices.ContainsFunc(s.parts.Weights.Portions(), func(x model.Portion) bool { return x.Frozen })
}

// stage describes what a resumed run may change by checkpoint.accept and what then must be equal.
func (s *session) stage() train.Stage {
	x := s.modelStage()
	j, d := s.Job, s.data.Train()
	x.Sequence, x.GlobalBatch, x.Sequences = j.Data.Sequence, j.Mesh.GlobalBatch, d.Sequences()
	x.Files, x.Tokenizer = d.Files()+", in "+s.dataNames(), strings.TrimPrefix(s.data.TokenizerDigest(), ", ")
	x.Conversations = strings.TrimPrefix(s.data.Conversations(), ", ")
	return x
}

// modelStage returns the part of stage that is of the model.
func (s *session) modelStage() train.Stage {
	c := *s.parts.Config
	positions := fmt.Sprintf("%d positions with RoPE %s", c.MaxPositionEmbeddings, ropeText(&c.Rope))
	if c.LocalRope != nil {
		positions += ", in windows " + ropeText(c.LocalRope)
	}
	c.MaxPositionEmbeddings, c.Rope, c.LocalRope = 0, model.Rope{}, nil
	return train.Stage{Positions: positions, Model: digest(c)}
}

// ropeText describes a RoPE: its type, its base, and the other values that are set.
func ropeText(r *model.Rope) string {
	text := fmt.Sprintf("%s, theta %v", r.Type, r.Theta)
	v := reflect.ValueOf(*r)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; name != "Type" && name != "Theta" && !v.Field(i).IsZero() {
			text += fmt.Sprintf(", %s %v", name, v.Field(i).Interface())
		}
	}
	return text
}

// dataNames returns the names of the training files, with what decides how they are packed and
// mixed.
func (s *session) dataNames() string {
	d := &s.Job.Data
	text := names(d.Path)
	for i, x := range d.Source {
		if i > 0 {
			text += "; "
		}
		text += fmt.Sprintf("%v of %s", x.Weight, names(x.Path))
	}
	if d.ShuffleDocuments && d.Pack {
		text += ", documents shuffled"
	}
	return text
}

// digest returns a short hash of a value, for comparing runs.
func digest(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	h := sha256.Sum256(text)
	return hex.EncodeToString(h[:8])
}

// names returns the names of files without their folders, which may have moved.
func names(paths []string) string {
	short := make([]string, len(paths))
	for i, p := range paths {
		short[i] = filepath.Base(p)
	}
	return strings.Join(short, ", ")
}

// resume reads the weights from a checkpoint, if there is one and checkpoint.resume is not "off".
// Collective.
func (s *session) resume(setup *train.Setup) error {
	j := s.Job
	setup.Checkpoints = s.checkpoints()
	path := j.Checkpoint.Resume
	switch path {
	case "off":
		setup.Loop.Stages = []train.Stage{setup.Checkpoints.Stage}
		return s.needsCheckpoint()
	case "auto":
		path = ""
	}
	from, err := setup.Checkpoints.Resume(path, s.Device, s.Mesh.World, s.parts.Weights, s.parts.Model.Groups(),
		&j.Optimizer, setup.Loop.Steps)
	if err != nil {
		return s.resumeFault(err)
	}
	setup.Loop.Stages = from.Stages
	if from.Path == "" {
		err = s.needsCheckpoint()
	} else {
		err = s.parts.Model.SetBiases(from.Biases)
	}
	if err != nil {
		return err
	}
	s.from, setup.Loop.Resumed, setup.Loop.Updates = from.Path, from.Step, from.Updates
	if err := s.resumeBest(setup, &from); err != nil {
		return err
	}
	for _, note := range from.Notes {
		s.Log.Warn().Msg(note)
	}
	if from.Path != "" {
		s.Log.Info().Int64("step", from.Step).Int64("of", setup.Loop.Steps).Str("checkpoint", from.Path).Msg("resumed")
	}
	return nil
}

// resumeFault names checkpoint.resume and its place in an error of a folder that does not exist.
// Such a value may also be a word of another trainer, such as "latest".
func (s *session) resumeFault(err error) error {
	dir := s.Job.Checkpoint.Resume
	if _, statErr := os.Stat(dir); dir == "auto" || !errors.Is(statErr, fs.ErrNotExist) {
		return err
	}
	fix := "name a checkpoint, or set \"auto\" for the newest one or \"off\" for a new run"
	if s.Job.Kind == "eval" {
		fix = "name a checkpoint, or a folder of checkpoints"
	}
	return s.Job.Errorf(status.IO, "checkpoint.resume", "there is no folder %s; %s", dir, fix)
}

// needsCheckpoint refuses optimizer.begin in a run that begins with its first step.
func (s *session) needsCheckpoint() error {
	if n := s.Job.Optimizer.Begin; n > 0 {
		return s.Job.Errorf(status.InvalidConfig, "optimizer.begin",
			"%d, and the run has no checkpoint from which it resumes, so it begins with step 1; remove it, or name the checkpoint with checkpoint.resume",
			n)
	}
	return nil
}

// adaptersText describes the settings of adapters.
func adaptersText(l *model.LoRA) string {
	return fmt.Sprintf("rank %d, alpha %v, rslora %v, targets %q", l.Rank, l.Alpha, l.RSLoRA, l.Targets)
}

// loadCheckpoint fills the weights of an evaluation from the checkpoint that checkpoint.resume
// names, if it names one. Collective.
func (s *session) loadCheckpoint() error {
	j := s.Job
	if !j.EvaluatesCheckpoint() {
		return nil
	}
	e := &train.Evaluated{Run: map[string]string{train.ModelKey: digest(s.parts.Config),
		train.SeedKey: fmt.Sprint(j.Seed)}, Stage: s.modelStage(), Frozen: s.frozen, Changes: s.parts.Config.Changes}
	if l := j.Adapters(); l != nil {
		e.Run[train.LoRAKey] = adaptersText(l)
	}
	from, err := train.LoadCheckpoint(j.Checkpoint.Resume, e, s.Device, s.Mesh.World, s.parts.Weights,
		s.parts.Model.Groups())
	if err != nil {
		return s.resumeFault(err)
	}
	if err := s.parts.Model.SetBiases(from.Biases); err != nil {
		return err
	}
	s.from = from.Path
	for _, note := range from.Notes {
		s.Log.Warn().Msg(note)
	}
	s.Log.Info().Int64("step", from.Step).Str("checkpoint", from.Path).Msg("weights of a checkpoint")
	return nil
}

// resumeBest continues the comparison of evaluations if the checkpoint is one of this folder.
// Collective.
func (s *session) resumeBest(setup *train.Setup, from *train.Resumed) (err error) {
	if setup.Track == nil || from.Best == nil {
		return nil
	}
	c, note := setup.Checkpoints, ""
	here := s.Mesh.World.Rank() == 0 && outdir.Inside(s.from, c.Dir)
	if setup.Loop.Best, note, err = c.ContinueBest(s.Mesh.World, from, setup.Track, here); note != "" {
		s.Log.Warn().Msg(note)
	}
	return err
}
