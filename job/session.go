package job

import (
	"cmp"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/gdn"
	"ulysses/model"
	"ulysses/train"
)

// session is a train or eval job that is ready to run: everything that can be refused has been.
type session struct {
	*Env
	config  *model.Config
	model   *model.Model
	weights train.Weights
	trainer *train.Trainer
	data    *data.Data
	steps   int64
	from    string  // checkpoint from which the run resumes; "" = none
	queued  float64 // queued() before the first step
	failed  error   // the error that ended the steps early, on all ranks
}

// prepare builds model, weights, data and trainer, from a checkpoint if it may. Collective: all
// ranks succeed or return the same code.
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

// load makes what the trainer is made of. Collective: ranks agree after each part that may fail on
// some.
func (s *session) load() (*train.Setup, error) {
	folder, err := s.openConfig()
	if folder != nil {
		defer folder.Close()
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return nil, err
	}
	if folder != nil { // another machine may have a stale copy of it
		if err = comm.SameFiles(s.Mesh.World, "model.path", folder.Files()); err != nil {
			return nil, err
		}
	}
	if err = s.layOut(); err == nil {
		err = s.fill(folder)
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return nil, err
	}
	j := s.Job
	config := j.Data
	if j.Kind == "eval" && len(j.Eval.Path) > 0 {
		config.Path = nil // data.path need not exist
	}
	if s.data, err = data.Open(config, j.Eval, data.Options{Vocab: s.config.VocabSize, Seed: uint64(j.Seed), Comm: s.Mesh.World, Workers: s.threads}); err != nil {
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
	s.warn(s.config, folder, s.steps)
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
	if j.Model.Path == "" {
		s.config, err = j.NewConfig()
	} else if folder, err = model.OpenFolder(j.Model.Path, j.Model.Override); err == nil {
		s.config = folder.Config
	}
	return folder, j.ModelFault(err)
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
	if err = s.model.SetTiles(j.Tile.Tiles()); err != nil {
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
	if s.alone && s.world.Kind() != "local" {
		// its peers read this rank's memory, which they have mapped, until its Abort ends them, and
		// it
		return
	}
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
