package job

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/outdir"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/tensor"
	"ulysses/train"
)

// keepModelApart refuses an output.dir whose files would go into the folder of the base model, also
// with output.overwrite. Rank 0 checks, and all ranks return its answer. Collective.
func (e *Env) keepModelApart() error {
	var err error
	if j := e.Job; e.Mesh.World.Rank() == 0 && j.Model.Path != "" {
		fail := func(format string, args ...any) {
			err = j.Errorf(status.InvalidConfig, "output.dir", format+"; choose another output.dir", args...)
		}
		switch base := j.Model.Path; {
		case outdir.Inside(j.Output.Dir, base):
			fail("%s is, or is inside, model.path = %s, which is never written to", j.Output.Dir, base)
		case j.Kind == "train" && j.Output.Model && outdir.Inside(base, j.ModelDir()):
			fail("the trained model would replace model.path = %s, which is, or is inside, %s", base, j.ModelDir())
		case j.Kind == "train" && outdir.Inside(base, j.CheckpointDir()):
			fail("model.path = %s is inside %s, whose checkpoints the run replaces", base, j.CheckpointDir())
		}
	}
	return comm.Agree(e.Mesh.World, err)
}

// refuseUsedFile refuses the output file of an operator job if it exists, unless output.overwrite
// is set. Rank 0 checks, and all ranks return its answer. Collective. checkOutput reports faults
// that another file name does not fix, such as a device.
func (e *Env) refuseUsedFile() error {
	var err error
	j := e.Job
	if input, output := j.OperatorFiles(); e.Mesh.World.Rank() == 0 && !j.Output.Overwrite {
		info, statErr := os.Stat(*output)
		from, _ := os.Stat(*input)
		if statErr == nil && info.Mode().IsRegular() && (from == nil || !os.SameFile(info, from)) {
			err = j.Errorf(status.InvalidConfig, j.Kind+".output",
				"%s exists; name another file, or set output.overwrite = true (--force)", *output)
		}
	}
	return comm.Agree(e.Mesh.World, err)
}

// runTrain trains or evaluates. Meanwhile no other job writes into output.dir.
func runTrain(e *Env) error {
	if err := e.keepModelApart(); err != nil {
		return err
	}
	if err := e.takeOutput(); err != nil {
		return err
	}
	var err error
	if e.Job.Kind == "train" { // in an evaluation only rank 0 writes
		err = e.shareOutput()
	}
	if err == nil {
		err = trainOwning(e)
		e.endFlight(err)
	}
	// after a panic nothing is released: the process ends, and the kernel releases the lock
	return e.releaseOutput(err)
}

// takeOutput makes rank 0 the owner of output.dir for the job. Collective.
func (e *Env) takeOutput() (err error) {
	if e.Mesh.World.Rank() == 0 {
		dir, self := e.Job.Output.Dir, outdir.Self(e.Job.Kind, e.Job.Path)
		e.signals.AtEnd(func() { outdir.Abandon(dir, self) })
		e.owner, err = outdir.Take(dir, self, func(text string) { e.Log.Warn().Msg(text) })
		if err == nil {
			err = e.owner.Check(e.Job.Outputs()...)
		}
		if err == nil {
			err = e.checkKinds()
		}
		if err != nil && e.owner != nil {
			e.owner.Undo()
			e.owner = nil
		}
		last := func() { e.releaseOwner(false) } // if this fails, a later job finds the owner dead
		if e.owner == nil {
			last = nil
		}
		e.signals.AtEnd(last)
	}
	return comm.Agree(e.Mesh.World, err)
}

// checkKinds returns an error if a folder in output.dir has the name of a file that the run writes,
// or a file the name of a folder. Otherwise the run would lose these results at its end.
func (e *Env) checkKinds() error {
	j := e.Job
	for _, name := range j.OutputFiles() {
		var other *input.KindError
		if _, err := input.Stat(filepath.Join(j.Output.Dir, name)); errors.As(err, &other) {
			return status.Errorf(status.IO, "output.dir: %w; remove it, or choose another output.dir", err)
		}
	}
	for _, name := range j.OutputFolders() {
		path := filepath.Join(j.Output.Dir, name)
		if info, err := os.Stat(path); err == nil && !info.IsDir() {
			return status.Errorf(status.IO,
				"output.dir: %s is a file, and the run writes a folder of this name; remove it, or choose another output.dir",
				path)
		}
	}
	return nil
}

// releaseOutput ends the ownership of output.dir after a job that ended with err. Collective,
// except for a rank whose error is its own.
func (e *Env) releaseOutput(err error) error {
	if e.alone && e.world.Kind() != "local" {
		// the process ends, which releases the lock; until then its peers may still write
		return err
	}
	var lost error
	e.signals.Locked(func() { lost = e.releaseOwner(err == nil) })
	if err != nil {
		if lost != nil {
			e.Log.Error().Msg(lost.Error())
		}
		return err
	}
	return comm.Agree(e.world, lost)
}

// releaseOwner ends the ownership of output.dir, once. The caller holds the lock of signals,
// because a signal may end the process meanwhile.
func (e *Env) releaseOwner(finished bool) error {
	o := e.owner
	if e.owner = nil; o == nil {
		return nil
	}
	if e.writes && e.Job.Kind == "train" {
		return o.Release(finished)
	}
	return o.Undo()
}

// mayWrite returns an error if a name in output.dir must not be written: the folder was removed,
// another job owns it, or a link leads elsewhere. It returns nil on ranks other than 0 and for
// verbs that own no folder.
func (e *Env) mayWrite(name string) error {
	if e.owner == nil {
		return nil
	}
	return e.owner.Check(name)
}

// createOutput refuses results of other runs. On rank 0 it then creates metrics.jsonl with the
// lines of the steps that are done. It runs before the first step, so a folder that cannot be
// written costs no step. Collective.
func (s *session) createOutput() (m *train.Metrics, err error) {
	j, t := s.Job, s.trainer
	if s.Mesh.World.Rank() == 0 {
		path := filepath.Join(j.Output.Dir, file.MetricsFile)
		if t.Checkpoints == nil {
			if err = s.removeLeft(); err == nil {
				m, err = train.EvaluationMetrics(path)
			}
			return m, comm.Agree(s.Mesh.World, err)
		}
		t.Checkpoints.Check = func() error { return s.mayWrite(j.Checkpoint.Dir) }
		resumes := s.resumesHere()
		if !resumes {
			if err = s.refuseResults(); err == nil {
				err = t.Checkpoints.Replace()
			}
		}
		if err == nil {
			err = s.checkRoom()
		}
		if err == nil {
			err = t.Checkpoints.Ready(t.Loop.Resumed)
		}
		if err == nil {
			err = s.owner.Identify(s.identity())
		}
		if err == nil {
			err = s.removeLeft()
		}
		if err == nil {
			if s.writes = true; resumes {
				m, err = train.ResumeMetrics(path, t.Loop.Resumed, t.CatchesUp())
			} else {
				m, err = train.CreateMetrics(path)
			}
		}
	}
	return m, comm.Agree(s.Mesh.World, err)
}

// resumesHere reports whether the run resumes from a checkpoint of its own output.dir, and
// continues the files there.
func (s *session) resumesHere() bool {
	return s.from != "" && outdir.Inside(s.from, s.trainer.Checkpoints.Dir)
}

// removeLeft removes the unfinished files that killed runs have left in output.dir. Otherwise a
// half-written model would keep its space for ever.
func (s *session) removeLeft() error {
	dir := s.Job.Output.Dir
	err := launch.RemoveLeft(dir)
	names := s.Job.Outputs()
	for _, name := range s.Job.OutputFolders() { // a model is written inside a folder that is a mount point
		names = append(names, filepath.Join(name, filepath.Base(name)))
	}
	for _, name := range names {
		if err == nil {
			err = tensor.RemoveLeft(filepath.Join(dir, name))
		}
	}
	if err != nil {
		return status.Errorf(status.IO,
			"output.dir: the unfinished files of an ended run cannot be removed: %w; remove them", err)
	}
	return nil
}

// checkRoom returns an error if the file system of output.dir has less free space than the run will
// surely write there: the weights of the model, and a checkpoint. Both are written before the ones
// that they replace are removed. A file system that reports no size is not checked.
func (s *session) checkRoom() error {
	j, t := s.Job, s.trainer
	var disk syscall.Statfs_t
	if t.Loop.Resumed >= s.steps || t.EndedEarly() || syscall.Statfs(j.Output.Dir, &disk) != nil || disk.Blocks == 0 {
		return nil
	}
	free, weights, state := int64(disk.Bavail)*int64(disk.Bsize), int64(0), t.CheckpointBytes()
	if j.Output.Model && s.onSameDisk(j.ModelDir()) {
		var err error
		if weights, err = s.parts.Model.SaveBytes(j.LoRA.Rank == 0); err != nil {
			return err
		}
	}
	if !s.onSameDisk(t.Checkpoints.Dir) {
		state = 0
	}
	needed := weights + state
	if steps, err := t.Checkpoints.Steps(); err == nil && len(steps) > 0 {
		needed = max(weights, state) // older checkpoints may be removed before the model is written
	}
	if free >= needed {
		return nil
	}
	return j.Errorf(status.IO, "output.dir",
		"%s has %s free, and the run writes at least %s there (weights of the model %s, a checkpoint %s); make room, or choose another output.dir",
		j.Output.Dir, units.Bytes(free), units.Bytes(needed), units.Bytes(weights), units.Bytes(state))
}

// onSameDisk reports whether a folder is on the file system of output.dir, as it is if it does not
// exist yet.
func (s *session) onSameDisk(path string) bool {
	var dir, folder syscall.Stat_t
	return syscall.Stat(path, &folder) != nil || syscall.Stat(s.Job.Output.Dir, &dir) != nil || folder.Dev == dir.Dev
}

// identity returns a digest of the settings that a run and its continuation must have in common.
func (s *session) identity() string { return digest(s.trainer.Checkpoints.Run) }

// refuseRequeued refuses a run that starts afresh because Slurm has requeued its job, if the
// earlier start has written checkpoints: they would be replaced.
func (s *session) refuseRequeued() error {
	if !s.owner.Requeued() || s.owner.Before.Run != s.identity() {
		return nil
	}
	steps, err := s.trainer.Checkpoints.Steps()
	if err != nil || len(steps) == 0 {
		return err
	}
	return s.Job.Errorf(status.InvalidConfig, "checkpoint.resume",
		"%q: Slurm has requeued the job, and a new start would replace the checkpoints up to step %d; submit it again with checkpoint.resume = \"auto\"",
		s.Job.Checkpoint.Resume, steps[len(steps)-1])
}

// refuseResults refuses output.dir for a run that starts afresh if the folder has results of
// another run. Results of the same run, if it ended before its first checkpoint, are not refused:
// the run starts again.
func (s *session) refuseResults() error {
	j := s.Job
	if j.Output.Overwrite {
		return s.refuseRequeued()
	}
	names := slices.DeleteFunc(j.Outputs(), func(name string) bool { return name == j.Checkpoint.Dir })
	found, err := outdir.Found(j.Output.Dir, names...)
	if err != nil {
		return err
	}
	steps, err := s.trainer.Checkpoints.Steps()
	if err != nil {
		return err
	}
	if len(steps) > 0 {
		found = append(found, fmt.Sprintf("%s/ up to step %d", j.Checkpoint.Dir, steps[len(steps)-1]))
	}
	if before := s.owner.Before; len(steps) == 0 && s.from == "" && before != nil && before.Run == s.identity() &&
		!slices.Contains(found, j.ModelFolder()+"/") {
		if len(found) > 0 {
			s.Log.Warn().Msgf("output.dir: the %v has ended before its first checkpoint; the run starts again", before)
		}
		return nil
	}
	if len(found) == 0 {
		return nil
	}
	return j.Errorf(status.InvalidConfig, "output.dir",
		"%s has results of another run (%s); choose another output.dir, or set output.overwrite = true (--force)",
		j.Output.Dir, strings.Join(found, ", "))
}
