package job

import (
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/internal/tfevents"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/job/plan"
	"ulysses/job/report"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// session is a job of kind "train" or "eval" on one rank, after all checks.
type session struct {
	*Env
	parts    *assembly.Parts
	trainer  *train.Trainer
	data     *data.Data
	steps    int64
	adapters *model.AdapterFolder // lora.init, while the weights are read; nil = none
	frozen   string               // fingerprint of the weights that are not trained
	from     string               // checkpoint from which the run resumes; "" = none
	folder   *model.Folder        // of the model, kept open; nil = closed, or none
	waited   float64              // report.WaitedForCore before the first step
	failed   error                // the error that ended the steps early on all ranks
	why      string               // stopReason, once the run has stopped

	// set before the first step
	metrics  *train.Metrics // nil on ranks above 0
	curves   *tfevents.File // nil on ranks above 0, and without output.tensorboard
	progress *progress
	slow     *stragglers
	sampler  *sampler // of eval.sample; nil = none
	stop     *launch.Stopper
}

// prepare makes the model, the weights, the data and the trainer. With resume it reads a
// checkpoint, if the job has one. Collective: all ranks succeed or return the same code.
func prepare(e *Env, resume bool) (*session, error) {
	s := &session{Env: e,
		parts: &assembly.Parts{Job: e.Job, Device: e.Device, Mesh: e.Mesh, Clock: e.Clock, Compute: e.Compute,
			FreeHost: e.freeHost, PerNode: e.perNode, Rates: plan.StepRates(e.Job, e.Device, e.Compute, e.perNode),
			OpenHost: e.openHost}}
	setup, err := s.load()
	if err == nil && resume && e.Job.Kind == "train" {
		err = s.resume(setup)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	if resume {
		if s.sampler, err = newSampler(s); err != nil {
			s.close()
			return nil, err
		}
		setup.Extra = s.sampler.components()
		setup.Trace = report.NewTrace(s.parts)
		s.hook(&setup.Hooks)
	}
	if s.trainer, err = train.New(*setup); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// load makes the setup of the trainer. Collective: the ranks agree after each step that may fail on
// some of them.
func (s *session) load() (*train.Setup, error) {
	folder, err := s.openConfig()
	if folder != nil {
		defer func() {
			if s.folder == nil {
				folder.Close()
			}
		}()
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return nil, err
	}
	if folder != nil { // another machine may have an older copy
		if err = comm.SameFiles(s.Mesh.World, "model.path", folder.Files()); err != nil {
			return nil, err
		}
	}
	if err = s.openAdapters(); err != nil {
		return nil, err
	}
	if s.adapters != nil {
		defer s.adapters.Close()
	}
	if err = s.parts.Layout(); err == nil {
		err = s.fill(folder)
	}
	if err = comm.Agree(s.Mesh.World, err); err == nil {
		err = s.loadCheckpoint()
	}
	if err != nil {
		return nil, err
	}
	if s.parts.Levels != "" {
		s.Log.Info().Msg("communicator: " + s.parts.Levels)
	}
	j := s.Job
	config := j.Data
	if j.Kind == "eval" {
		config.ShuffleDocuments = false // of training
		if len(j.Eval.Path)+len(j.Eval.Set) > 0 {
			config.Path, config.Source = nil, nil // the evaluation does not read data.path
		}
	}
	if s.data, err = data.Open(config, j.Eval,
		data.Options{Vocab: s.parts.Config.VocabSize, Seed: uint64(j.Seed), Comm: s.Mesh.World,
			Workers: s.threads}); err != nil {
		return nil, j.DataFault(err)
	}
	setup := s.parts.Setup()
	setup.Data.Evals = s.data.Evals()
	if j.Kind == "train" {
		setup.Data.Train = s.data.Train()
		s.steps = j.Train.Steps
		if j.Train.Epochs > 0 {
			s.steps = s.data.Train().Steps(j.Train.Epochs, j.Mesh.GlobalBatch)
		}
		setup.Loop.Steps = s.steps
		setup.Track = s.track()
	} else if len(setup.Data.Evals) == 0 {
		// without eval.path and eval.split: all of data.path
		setup.Data.Evals = []data.NamedSet{{Set: s.data.Train().InOrder()}}
	}
	s.warn(s.parts.Config, folder, s.steps)
	s.warnOfCut(setup)
	setup.Hooks.Probe, err = launch.FaultHook(s.Mesh.World)
	return setup, comm.Agree(s.Mesh.World, err)
}

// hook sets the hooks of the trainer. They use metrics, curves, progress, slow and stop, which are
// nil until the first step.
func (s *session) hook(h *train.Hooks) {
	h.Step = func(r *train.Record) error {
		s.flight.Step(r.Step)
		if err := s.metrics.Write(r); err != nil {
			return err
		}
		if err := s.curve(r); err != nil {
			return err
		}
		if s.progress == nil {
			return nil
		}
		if err := s.progress.step(r); err != nil {
			return err
		}
		return s.slow.step(r)
	}
	h.Eval = func(r *train.EvalRecord) error {
		if s.Job.Kind == "eval" && s.from != "" {
			r.Checkpoint = filepath.Base(s.from)
		}
		if s.progress != nil {
			s.progress.eval(r)
		}
		if err := s.metrics.Write(r); err != nil {
			return err
		}
		if err := s.curveOfEval(r); err != nil {
			return err
		}
		return s.sample(r.Step)
	}
	h.Skipped = func(why string) {
		s.Log.Warn().Msg(why + ": the step is skipped; later steps of this kind are skipped without a message")
	}
	h.Unsaved = func(err error) {
		s.Log.Warn().Msgf("%v; the run continues, and the next checkpoint is the next attempt", err)
	}
	h.Left = func(err error) {
		s.Log.Warn().Msgf("%v; the run continues, and removes it later", err)
	}
	h.Saved = func(took time.Duration) {
		if s.stop != nil {
			s.stop.Saved(took)
		}
	}
	h.Stop = func() bool { return s.stop != nil && s.stop.Now() }
}

// track says how the run compares its evaluations; nil = it does not.
func (s *session) track() *train.Track {
	j := s.Job
	if !j.Tracks() {
		return nil
	}
	sets := make([]string, 0, len(s.data.Evals()))
	for _, set := range s.data.Evals() {
		sets = append(sets, set.Name+" "+set.Identity())
	}
	of := digest(sets)
	if j.Eval.Metric != "" {
		of = "eval.metric = " + j.Eval.Metric + ", " + of
	}
	return &train.Track{Metric: j.Eval.Metric, Patience: j.Eval.Patience, Threshold: j.Eval.Threshold, Of: of}
}

// openConfig reads the model's configuration. The folder is nil for a model from scratch.
func (s *session) openConfig() (folder *model.Folder, err error) {
	j := s.Job
	if j.Model.Path == "" {
		s.parts.Config, err = j.NewConfig()
	} else if folder, err = model.OpenFolder(j.Model.Path, j.Model.Override); err == nil {
		s.parts.Config = folder.Config
	}
	if err = j.ModelFault(err); err == nil {
		err = j.Fit(s.parts.Config)
	}
	return folder, err
}

// openAdapters opens lora.init. Collective.
func (s *session) openAdapters() error {
	if s.Job.LoRA.Init == "" {
		return nil
	}
	f, err := model.OpenAdapters(s.Job.LoRA.Init)
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		if f != nil {
			f.Close()
		}
		return err
	}
	s.adapters = f
	return comm.SameFiles(s.Mesh.World, "lora.init", f.Files())
}

// fill reads the weights from the folder, or draws them from the seed.
func (s *session) fill(folder *model.Folder) error {
	if folder != nil {
		if s.hasFrozen() || s.Job.EvaluatesCheckpoint() {
			var err error
			if s.frozen, err = folder.Fingerprint(); err != nil {
				return err
			}
		}
		if err := folder.Load(s.parts.Model); err != nil {
			return err
		}
		if s.Job.LoRA.Rank == 0 {
			s.keep(folder)
			return nil
		}
		if s.adapters != nil {
			return s.parts.Model.LoadAdapters(s.adapters)
		}
		return s.parts.Model.InitAdapters(uint64(s.Job.Seed))
	}
	s.frozen = "drawn from the seed"
	return s.parts.Model.Init(uint64(s.Job.Seed))
}

// keep keeps the folder of the model open if the run saves frozen weights, which may be rounded in
// memory.
func (s *session) keep(folder *model.Folder) {
	if s.Job.Kind == "train" && s.Job.Output.Model && s.hasFrozen() && s.Compute != tensor.F32 {
		s.folder = folder
		s.parts.Model.KeepFolder(folder)
	}
}

// checkFolder compares the folder of keep with the one that was read. If its files were written to
// since, frozen weights are saved from memory. Rank 0 saves, so rank 0 decides. Collective.
func (s *session) checkFolder() error {
	if s.folder == nil {
		return nil
	}
	changed := []int64{0}
	if now, err := s.folder.Fingerprint(); err != nil || now != s.frozen {
		changed[0] = 1
	}
	if err := s.Mesh.World.Broadcast(nil, tensor.OfInt64(changed, 1), 0); err != nil || changed[0] == 0 {
		return err
	}
	s.parts.Model.KeepFolder(nil)
	s.Log.Warn().Msgf(
		"model.path: the weights in %s were changed during the run; frozen weights are saved as rounded to %s",
		s.folder.Dir, file.DTypeName(s.Compute))
	return nil
}

func (s *session) close() {
	if s.alone && s.world.Kind() != "local" {
		// Other ranks may still read this rank's memory. Abort ends all processes.
		return
	}
	if s.trainer != nil {
		s.trainer.Free()
	}
	s.sampler.free()
	if s.data != nil {
		s.data.Close()
	}
	if s.folder != nil {
		s.folder.Close()
	}
	s.parts.Free()
}

// report returns the description of the run for the report.
func (s *session) report() *report.Run {
	r := &report.Run{Parts: s.parts, Trainer: s.trainer, Rank: s.rank(), Ledger: s.Ledger, From: s.from, Steps: s.steps,
		Began: s.began, Waited: s.waited, Threads: s.world.Kind() == "local", Beside: s.metrics.BesideRun(),
		Program: programVersion(), Source: s.source, Sets: s.sets, Warnings: s.warned.list, Warn: func(text string) {
			s.Log.Warn().Msg(text)
		}, Check: s.mayWrite,
		Stdout: s.Stdout, Details: s.Details}
	if s.progress != nil {
		r.Totals = s.progress.totals
	}
	r.Why = s.why
	if s.failed != nil {
		r.Failed = withoutRanks(s.failed)
	}
	if s.quiet {
		r.Result = s.Result
	}
	return r
}

// rank returns this rank for the planner.
func (s *session) rank() *plan.Rank {
	return &plan.Rank{Parts: s.parts, LocalRank: s.local}
}
