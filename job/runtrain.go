package job

import (
	"fmt"
	"os"
	"strconv"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/launch"
	"ulysses/job/report"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// trainOwning trains or evaluates while rank 0 owns output.dir.
func trainOwning(e *Env) (err error) {
	start := time.Now()
	if e.Job.Kind == "eval" && e.Job.Model.Path == "" && !e.Job.EvaluatesCheckpoint() {
		e.Log.Warn().Msg(
			"kind = \"eval\" with [model.new]: the weights are random, drawn from seed; set model.path to a trained model")
	}
	s, err := prepare(e, true)
	if err != nil {
		return err
	}
	defer s.close()
	defer func() { err = e.leave(err) }()
	if s.metrics, err = s.createOutput(); err != nil {
		return err
	}
	defer s.metrics.Close()
	if s.curves, err = s.openCurves(); err != nil {
		return err
	}
	defer s.curves.Close()
	if err := e.recordFlight(); err != nil {
		return err
	}
	if err := s.report().PrintPlan(); err != nil {
		return err
	}
	if done := s.trainer.Loop.Resumed; e.Job.Kind == "train" && done >= s.steps {
		fmt.Fprintf(e.Result, "nothing left to do: the checkpoint has %s, and train.steps is %d\n",
			units.Count(done, "step"), s.steps)
		return s.saveMissing()
	}
	if s.Job.Kind == "train" && s.trainer.EndedEarly() {
		fmt.Fprintf(e.Result, "nothing left to do: the run ended early after %s of %d, because %s; the best is %s\n",
			units.Count(s.trainer.Loop.Resumed, "step"), s.steps, report.WhyEarly(s.Job), s.trainer.Best())
		return s.saveMissing()
	}
	if s.stop, err = launch.NewStopper(e.Job.Train.TimeLimit, e.signals, start,
		func(text string) { e.Log.Warn().Msg(text) }); err != nil {
		return err
	}
	if warning := s.rank().WarnIdleRanks(nil); warning != "" {
		e.Log.Warn().Msg(warning)
	}
	s.waited = report.WaitedForCore(s.world)
	s.slow = newStragglers(e)
	s.progress = newProgress(e, s.steps, s.trainer.Loop.Resumed)
	err = func() error {
		defer s.progress.finish()
		defer e.signals.Done()
		return e.inStep(s.run)
	}()
	return s.conclude(err)
}

// conclude writes the report and, after a complete training run, the model. err is the error of the
// steps. If the run has stopped early, conclude returns an error with the code Preempted.
// Collective, except for a rank whose error is its own.
func (s *session) conclude(err error) error {
	if train.Shared(err) && s.trainer.Complete() && s.Job.Output.Model && status.Of(err) == status.IO {
		err = s.saveWithout(err)
	}
	if train.Shared(err) { // all ranks have this error and can write the report together
		s.reportFailure(err)
	}
	if err != nil {
		return err
	}
	if s.trainer.Stopped() {
		s.signals.Saved()
		why, err := s.stopReason()
		if err != nil {
			return err
		}
		s.why = why
		// The checkpoint is complete, so an error of writing the report is only logged.
		if err := s.report().Write(); status.Of(err) == status.IO {
			s.logLost(err)
		} else if err != nil {
			return err
		}
		return status.Errorf(status.Preempted, "stopped after step %d of %d%s with a checkpoint in %s; resume with: %s",
			s.progress.totals.Last.Step, s.steps, why, s.trainer.Checkpoints.Dir, s.command())
	}
	if s.Job.Kind == "train" && s.Job.Output.Model {
		if err := s.save(s.Job.ModelDir()); err != nil {
			if status.Of(err) == status.IO { // rank 0 could not write, and all ranks have its error
				s.reportFailure(err)
			}
			return err
		}
	}
	return s.report().Write()
}

// saveWithout writes the model of a run whose last checkpoint could not be written, for the reason
// err. A checkpoint is several times larger than the model, so the model may have room. saveWithout
// returns err with the model's folder. Collective.
func (s *session) saveWithout(err error) error {
	switch lost := s.save(s.Job.ModelDir()); {
	case lost == nil:
		return status.Errorf(status.Of(err), "%w; the trained weights are in %s", err, s.Job.ModelDir())
	case status.Of(lost) != status.IO:
		return lost
	}
	return err
}

// reportFailure writes the report of a run that all ranks end with an error. Collective.
func (s *session) reportFailure(err error) {
	s.failed = err
	if lost := s.report().Write(); lost != nil {
		s.logLost(lost)
	}
}

// logLost logs the error of a report: once if all ranks have it.
func (s *session) logLost(err error) {
	if s.Mesh.World.Rank() == 0 || status.Of(err) != status.IO {
		s.Log.Error().Msg(withoutRanks(err))
	}
}

// stopReason returns why the run has stopped, in parentheses: the first rank that wanted it, with
// its host and the signal, or the time limit. Collective.
func (s *session) stopReason() (string, error) {
	host, _ := os.Hostname()
	type reason struct{ Why, Host string }
	all, err := comm.GatherJSON(s.Mesh.World, "reasons to stop", reason{s.stop.Reason(), host})
	if err != nil {
		return "", err
	}
	first, alike := -1, true
	for r, x := range all {
		if first < 0 && x.Why != "" {
			first = r
		}
		alike = alike && x.Why == all[0].Why
	}
	switch {
	case first < 0:
		return "", nil
	case alike:
		return fmt.Sprintf(" (%s)", all[0].Why), nil
	}
	return fmt.Sprintf(" (%s on rank %d, host %s)", all[first].Why, first, all[first].Host), nil
}

// run runs the steps, or the evaluation.
func (s *session) run() error {
	if s.Job.Kind == "eval" {
		_, err := s.trainer.Evaluate(train.EvaluationStep)
		return err
	}
	return s.trainer.Run()
}

// saveMissing writes the model of a run that ended after its last checkpoint and before the model
// was written. Then the folder has no model, or one that is older than the checkpoint: of another
// run, or of this one with fewer steps. A run that resumes from a checkpoint of another folder has
// not written the model that is here. Collective.
func (s *session) saveMissing() error {
	if !s.Job.Output.Model {
		return nil
	}
	missing := []int64{0}
	written, err := os.Stat(s.Job.ModelDir())
	last, _ := os.Stat(s.from)
	if os.IsNotExist(err) || !s.resumesHere() || err == nil && last != nil && written.ModTime().Before(last.ModTime()) {
		missing[0] = 1
	}
	if err := s.Mesh.World.Broadcast(nil, tensor.OfInt64(missing, 1), 0); err != nil || missing[0] == 0 {
		return err
	}
	if err := s.save(s.Job.ModelDir()); err != nil {
		return err
	}
	_, err = fmt.Fprintf(s.Stdout, "model            %s, which was missing, older than the checkpoint or of another run\n",
		s.Job.ModelDir())
	return err
}

// save writes the trained weights as a Hugging Face folder. Collective: rank 0 writes, and every
// rank contributes its shard of each portion.
func (s *session) save(dir string) error {
	stream, err := s.Device.NewStream()
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return err
	}
	defer stream.Close()
	if err := s.checkFolder(); err != nil {
		return err
	}
	portions, err := s.parts.Model.SaveOrder(s.Job.LoRA.Rank == 0) // adapters leave out the frozen model
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return err
	}
	next := 0 // the portion to gather next
	var lost error
	whole := func(x model.Portion) (tensor.Tensor, error) {
		next++
		t, err := s.whole(x, false, stream)
		lost = err
		return t, err
	}
	if s.Mesh.World.Rank() == 0 {
		if err = s.mayWrite(s.Job.ModelFolder()); err == nil {
			save := s.parts.Model.Save
			if s.Job.LoRA.Rank > 0 {
				save = s.parts.Model.SaveAdapters
			}
			err = save(dir, s.companions(), whole)
		}
	}
	// The other ranks, and rank 0 if the folder cannot be written, take part in the remaining
	// gathers.
	for next < len(portions) && lost == nil {
		whole(portions[next])
	}
	if lost != nil {
		return lost // communication has failed: the ranks cannot agree
	}
	return comm.Agree(s.Mesh.World, err)
}

// whole gathers the weights or gradients of a portion and waits for them. Collective.
func (s *session) whole(x model.Portion, grads bool, stream device.Stream) (tensor.Tensor, error) {
	t, err := s.parts.Weights.Whole(x, grads, stream)
	if err == nil {
		err = comm.BarrierBeforeSync(s.Mesh.World)
	}
	if err == nil {
		err = stream.Sync()
	}
	return t, err
}

// command returns the command line that resumes this job from its newest checkpoint, quoted for a
// shell.
func (e *Env) command() string {
	args := e.args
	if len(args) == 0 { // there is no command line: Run was called
		args = []string{os.Args[0], e.Job.Path}
		for _, s := range e.sets {
			args = append(args, "--set", s)
		}
		if n := e.world.Size(); n > 1 {
			args = append(args, "--ranks", strconv.Itoa(n))
		}
	}
	again := launch.Command(args)
	if resume := e.Job.Checkpoint.Resume; resume != "auto" && resume != "" {
		again += " --set checkpoint.resume=auto" // the run has started afresh, or from another checkpoint
	}
	return again
}
