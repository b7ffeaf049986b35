package job

import (
	"os"
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/internal/tfevents"
	"ulysses/job/file"
	"ulysses/train"
)

// openCurves creates an event file on rank 0 if output.tensorboard is set. A run that does not
// resume from a checkpoint of output.dir removes the event files of the run before. Collective.
func (s *session) openCurves() (f *tfevents.File, err error) {
	if !s.Job.Output.TensorBoard || s.Job.Kind != "train" {
		return nil, nil
	}
	if s.Mesh.World.Rank() == 0 {
		f, err = s.createCurves()
	}
	return f, comm.Agree(s.Mesh.World, err)
}

func (s *session) createCurves() (*tfevents.File, error) {
	if err := s.mayWrite(file.TensorBoardFolder); err != nil {
		return nil, err
	}
	dir, done := filepath.Join(s.Job.Output.Dir, file.TensorBoardFolder), s.trainer.Loop.Resumed
	if !s.resumesHere() { // metrics.jsonl begins anew as well
		for _, path := range input.Match(dir, tfevents.Pattern) {
			if err := os.Remove(path); err != nil {
				return nil, status.Errorf(status.IO, "tensorboard: %w; choose another output.dir", err)
			}
		}
	}
	return tfevents.Create(dir, time.Now(), done+1)
}

// curve appends a step to the event file.
func (s *session) curve(r *train.Record) error {
	if s.curves == nil {
		return nil
	}
	values := map[string]float64{"train/loss": float64(r.Loss), "train/grad_norm": float64(r.GradNorm),
		"train/lr": r.LR, "train/total_tokens": float64(r.TotalTokens),
		"speed/seconds": r.Seconds, "speed/tokens_per_second": r.TokensPerSecond, "speed/model_tflops": r.ModelTFLOPS}
	if r.AuxLoss != nil {
		values["train/aux_loss"] = float64(*r.AuxLoss)
	}
	if r.ExpertLoad != nil {
		values["train/expert_load"] = float64(*r.ExpertLoad)
	}
	for phase, seconds := range r.PhaseSeconds {
		values["phase_seconds/"+phase] = seconds
	}
	return s.curves.Scalars(time.Now(), r.Step, values)
}

// curveOfEval appends an evaluation to the event file.
func (s *session) curveOfEval(r *train.EvalRecord) error {
	values := map[string]float64{"eval/loss": float64(r.EvalLoss)}
	for _, set := range r.Sets {
		values["eval/"+set.Name+"/loss"] = float64(set.Loss)
	}
	return s.curves.Scalars(time.Now(), r.Step, values)
}
