package job

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// session is a train or eval job that is ready to run: everything that can be refused has been.
type session struct {
	*Env
	config  *model.Config
	model   *model.Model
	weights train.Weights
	trainer *train.Trainer
	data    *train.Data
	steps   int64
	failed  error // what ended the steps before their time, on all ranks
}

func runTrain(e *Env) (err error) {
	start := time.Now()
	if e.Job.Kind == "eval" && e.Job.Model.Path == "" {
		e.Log.Warn().Msg("kind = \"eval\" with [model.new]: its weights are not trained, but drawn from seed: give model.path, such as a run's model/")
	}
	s, err := prepare(e, true)
	if err != nil {
		return err
	}
	defer s.close()
	defer func() { err = e.leave(err) }()
	metrics, err := createOutput(e, s.trainer)
	if err != nil {
		return err
	}
	s.trainer.Metrics = metrics
	defer metrics.Close()
	if err := s.printMemory(); err != nil {
		return err
	}
	if done := s.trainer.Resumed; e.Job.Kind == "train" && done >= s.steps {
		fmt.Fprintf(e.Stdout, "nothing left to do: the checkpoint has %d steps and train.steps is %d\n", done, s.steps)
		return s.saveMissing()
	}
	stop, err := newStopper(e.Job, e.asked, start)
	if err != nil {
		return err
	}
	p := newProgress(e, s.steps, s.trainer.Resumed)
	s.trainer.OnStep, s.trainer.OnEval, s.trainer.Stop = p.step, p.eval, stop.now
	s.trainer.OnSkip = func(why string) {
		e.Log.Warn().Msg(why + ": the step is left out, and so are others like it, without a word")
	}
	err = e.inStep(s.run)
	p.finish()
	if train.Shared(err) { // all ranks are here, with the steps that were done
		s.failed = err
		if lost := s.report(p); lost != nil {
			s.Log.Error().Msg(lost.Error())
		}
	}
	if err != nil {
		return err
	}
	if e.Job.Kind == "eval" && p.evals[0].EvalTokens == 0 {
		return e.Job.Errorf(status.InvalidConfig, "data.sequence", "not one token is a target, so that there is no loss: a row's and a document's first token are none; give longer documents or rows")
	}
	if s.trainer.Stopped() {
		if err := s.report(p); status.Of(err) == status.IO { // on all ranks; the checkpoint is there, and that is what counts
			s.Log.Error().Msg(err.Error())
		} else if err != nil {
			return err
		}
		return status.Errorf(status.Preempted, "stopped after step %d of %d with a checkpoint in %s: run the job again and it goes on from there",
			p.last.Step, s.steps, s.trainer.Keep.Dir)
	}
	if e.Job.Kind == "train" && e.Job.Output.Model {
		if err := s.save(s.modelDir()); err != nil {
			return err
		}
	}
	return s.report(p)
}

func (s *session) run() error {
	if s.Job.Kind == "eval" {
		_, err := s.trainer.Evaluate(train.EvaluationStep)
		return err
	}
	return s.trainer.Run()
}

// prepare builds model, weights, data and trainer, from a checkpoint if it may. Collective: all ranks succeed or return the same code.
func prepare(e *Env, resume bool) (*session, error) {
	s := &session{Env: e}
	setup, err := s.load()
	if err == nil && resume && e.Job.Kind == "train" {
		err = s.resume(setup)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	if resume {
		setup.Trace = s.newTrace()
	}
	if s.trainer, err = train.New(*setup); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// load makes what the trainer is made of. Collective: ranks agree after each part that may fail on some.
func (s *session) load() (*train.Setup, error) {
	folder, err := s.openConfig()
	if folder != nil {
		defer folder.Close()
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return nil, err
	}
	if err = s.layOut(); err == nil {
		err = s.fill(folder)
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return nil, err
	}
	j := s.Job
	if s.data, err = train.OpenData(j.Data, j.Eval, train.Opening{Vocab: s.config.VocabSize, Seed: uint64(j.Seed), Comm: s.Mesh.World, Workers: s.threads}); err != nil {
		return nil, err
	}
	setup := s.setup()
	setup.Eval = s.data.Eval()
	if j.Kind == "train" {
		setup.Train = s.data.Train()
		s.steps = j.Train.Steps
		if j.Train.Epochs > 0 {
			s.steps = s.data.Train().Steps(j.Train.Epochs, j.Mesh.GlobalBatch)
		}
		setup.Steps = s.steps
	} else if setup.Eval == nil {
		setup.Eval = s.data.Train() // neither eval.path nor eval.split: all of data.path
	}
	setup.Probe, err = probe(s.Mesh.World.Rank())
	return setup, comm.Agree(s.Mesh.World, err)
}

// setup is what of a trainer's the job file says, without data.
func (s *session) setup() *train.Setup {
	j := s.Job
	return &train.Setup{Device: s.Device, Mesh: s.Mesh, Model: s.model, Weights: s.weights, Data: &j.Data, Optimizer: &j.Optimizer,
		OnNaN: j.Train.OnNaN, Memory: j.Memory, FreeHost: s.free, EvalEvery: j.Eval.Every, Clock: s.Clock}
}

// openConfig reads what the model is; the folder is nil for one from scratch.
func (s *session) openConfig() (folder *model.Folder, err error) {
	j := s.Job
	if j.Model.Path != "" {
		if folder, err = model.OpenFolder(j.Model.Path, j.Model.Override); err == nil {
			s.config = folder.Config
		} else if from := train.FindCheckpoint(j.Model.Path); from != "" {
			err = status.Errorf(status.Of(err), "%w; it holds a checkpoint, of which `ulysses-mpi export %s FOLDER` makes such a folder", err, from)
		}
	} else {
		s.config, err = j.newConfig()
	}
	return folder, err
}

// newConfig is that of a model from scratch.
func (j *Job) newConfig() (*model.Config, error) {
	config, err := model.ConfigFromMap(j.Model.New)
	if err == nil {
		config, err = config.Override(j.Model.Override)
	}
	return config, err
}

// layOut makes the model and whoever holds its weights. model.New talks to the sequence group.
func (s *session) layOut() error {
	j := s.Job
	strategy, err := gdn.ParseStrategy(j.GDN.Strategy)
	if err != nil {
		return err
	}
	s.model, err = model.New(s.Device, s.Mesh.Seq, s.config, model.Options{Compute: s.Compute, Strategy: strategy, Tokens: cmp.Or(j.Data.Budget, j.Data.Batch*j.Data.Sequence)})
	if err != nil {
		return err
	}
	if err = s.model.SetTiles(j.Tile.tiles()); err != nil {
		return err
	}
	var opt *train.OptimizerConfig
	if j.Kind == "train" {
		opt = &j.Optimizer
	}
	s.weights, err = train.NewWeights(s.Device, s.Mesh.World, s.model.Groups(), s.Compute, opt, int(j.Parallel.Zero))
	return err
}

// fill gives the weights their values.
func (s *session) fill(folder *model.Folder) error {
	if folder != nil {
		return folder.Load(s.model)
	}
	return s.model.Init(uint64(s.Job.Seed))
}

func (s *session) close() {
	if s.trainer != nil {
		s.trainer.Free()
	}
	if s.data != nil {
		s.data.Close()
	}
	if s.weights != nil {
		s.weights.Free()
	}
	if s.model != nil {
		s.model.Close()
	}
}

// createOutput makes the output folder and metrics.jsonl, with the lines of the steps that are done, on rank 0, and looks at the checkpoints': before
// the first step, so that a folder that cannot be written costs nothing.
func createOutput(e *Env, t *train.Trainer) (m *train.Metrics, err error) {
	if e.Mesh.World.Rank() == 0 {
		dir := e.Job.Output.Dir
		if err = os.MkdirAll(dir, 0o777); err != nil {
			err = status.Errorf(status.IO, "output.dir: %w: choose a folder that can be written", err)
		} else if t.Keep != nil {
			err = t.Keep.Ready()
		}
		if err == nil {
			path := filepath.Join(dir, "metrics.jsonl")
			switch done := t.Resumed; {
			case e.Job.Kind == "eval":
				m, err = train.EvaluationMetrics(path)
			case done > 0:
				m, err = train.ResumeMetrics(path, done)
			default:
				m, err = train.CreateMetrics(path)
			}
		}
	}
	return m, comm.Agree(e.Mesh.World, err)
}

func (s *session) modelDir() string { return filepath.Join(s.Job.Output.Dir, "model") }

// saveMissing writes the model of a run that was ended between its last checkpoint and the end.
func (s *session) saveMissing() error {
	if !s.Job.Output.Model {
		return nil
	}
	missing := []int64{0}
	if _, err := os.Stat(s.modelDir()); os.IsNotExist(err) {
		missing[0] = 1
	}
	if err := s.Mesh.World.Broadcast(nil, tensor.OfInt64(missing, 1), 0); err != nil || missing[0] == 0 {
		return err
	}
	if err := s.save(s.modelDir()); err != nil {
		return err
	}
	_, err := fmt.Fprintf(s.Stdout, "model            %s, which was missing\n", s.modelDir())
	return err
}

// save writes the trained weights as a Hugging Face folder. Every rank lends what it keeps.
func (s *session) save(dir string) error {
	stream, err := s.Device.NewStream()
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return err
	}
	defer stream.Close()
	groups := len(s.model.Groups())
	next := 0 // to be lent
	var lost error
	whole := func(group int) (tensor.Tensor, error) {
		next = group + 1
		t, err := s.wholeGroup(group, false, stream)
		lost = err
		return t, err
	}
	if s.Mesh.World.Rank() == 0 {
		err = s.model.Save(dir, s.Job.Model.Path, whole)
	}
	for next < groups && lost == nil { // the others, and rank 0 when the folder cannot be written: nobody is left waiting
		whole(next)
	}
	if lost != nil {
		return lost // no peer to agree with
	}
	return comm.Agree(s.Mesh.World, err)
}

// wholeGroup gathers a group's weights or gradients and waits until they are there. Collective.
func (s *session) wholeGroup(group int, grads bool, stream device.Stream) (tensor.Tensor, error) {
	t, err := s.weights.Whole(group, grads, stream)
	if err == nil {
		err = comm.Meet(s.Mesh.World)
	}
	if err == nil {
		err = stream.Sync()
	}
	return t, err
}
