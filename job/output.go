package job

import (
	"os"
	"path/filepath"

	"ulysses/comm"
	"ulysses/internal/outdir"
	"ulysses/internal/status"
)

func (j *Job) modelDir() string      { return filepath.Join(j.Output.Dir, "model") }
func (j *Job) checkpointDir() string { return filepath.Join(j.Output.Dir, j.Checkpoint.Dir) }

// keepModelApart refuses an output.dir whose files would go into the folder of the base model, whatever output.overwrite says. Rank 0
// looks, and all ranks return its answer. Collective.
func (e *Env) keepModelApart() error {
	var err error
	if j := e.Job; e.Mesh.World.Rank() == 0 && j.Model.Path != "" {
		fail := func(format string, args ...any) {
			err = j.Errorf(status.InvalidConfig, "output.dir", format+"; choose another output.dir", args...)
		}
		switch base := j.Model.Path; {
		case outdir.Inside(j.Output.Dir, base):
			fail("%s is, or lies in, model.path = %s, which is never written to", j.Output.Dir, base)
		case j.Kind == "train" && j.Output.Model && outdir.Inside(base, j.modelDir()):
			fail("the trained model would replace model.path = %s, which is, or lies in, %s", base, j.modelDir())
		case j.Kind == "train" && outdir.Inside(base, j.checkpointDir()):
			fail("model.path = %s lies in %s, whose checkpoints the run replaces", base, j.checkpointDir())
		}
	}
	return comm.Agree(e.Mesh.World, err)
}

// refuseUsedFile refuses an output of an operator job that exists, unless output.overwrite is set. Rank 0 looks, and all ranks return its
// answer. Collective. Faults that another name of the output does not mend, such as a device, are left to checkOutput.
func (e *Env) refuseUsedFile() error {
	var err error
	j := e.Job
	if output := *savedJobs[j.Kind].output(j); e.Mesh.World.Rank() == 0 && !j.Output.Overwrite {
		info, statErr := os.Stat(output)
		input, _ := os.Stat(*savedJobs[j.Kind].input(j))
		if statErr == nil && info.Mode().IsRegular() && (input == nil || !os.SameFile(info, input)) {
			err = j.Errorf(status.InvalidConfig, j.Kind+".output", "%s exists; name another file, or set output.overwrite = true (--force)", output)
		}
	}
	return comm.Agree(e.Mesh.World, err)
}
