package job

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/job/file"
)

// A signal that comes before the first step, while device, model and data are opened, stops the run
// after the first step.
func TestStopEarly(t *testing.T) {
	dir, _ := newKept(t)
	ask := func(c backends.Choice) (device.Device, string, error) {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			return nil, "", err
		}
		return backends.Open(c)
	}
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: []string{"train.steps=1000"}, Ranks: 2,
		Stdout: io.Discard, Stderr: io.Discard,
		open: opener{ask, backends.OpenComm, nil}})
	if status.Of(err) != status.Preempted {
		t.Errorf("it is to stop, and %v", err)
	}
}

// A run that stopped early prints the outputs that it has written, which do not include a model.
func TestStoppedRunNamesWhatIsThere(t *testing.T) {
	dir, _ := newKept(t)
	for _, quiet := range []bool{false, true} {
		ask := func(c backends.Choice) (device.Device, string, error) {
			if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
				return nil, "", err
			}
			return backends.Open(c)
		}
		var out strings.Builder
		err := Run(Options{Path: filepath.Join(dir, "job.toml"),
			Sets: []string{"train.steps=1000", "checkpoint.resume=off", "output.overwrite=true"}, Quiet: quiet,
			Stdout: &out, Stderr: io.Discard,
			open: opener{ask, backends.OpenComm, nil}})
		if _, statErr := os.Stat(filepath.Join(dir, "out", "model")); status.Of(err) != status.Preempted ||
			statErr == nil || strings.Contains(out.String(), filepath.Join("out", "model")) ||
			!strings.Contains(out.String(), "report") ||
			!strings.HasSuffix(err.Error(), " --set checkpoint.resume=off --set output.overwrite=true --set checkpoint.resume=auto") {
			t.Errorf("%v\n%s", err, out.String())
		}
		page, err := os.ReadFile(filepath.Join(dir, "out", "report.html"))
		if err != nil || !strings.Contains(string(page), "of 1000 (SIGUSR1), with a checkpoint") {
			t.Errorf("the report does not name the reason (%v)", err)
		}
	}
}

// onLine is a log writer that calls a function with each line.
type onLine func(line string)

func (f onLine) Write(line []byte) (int, error) {
	f(string(line))
	return len(line), nil
}

// A run that must stop writes its checkpoint before an evaluation that is due, because little time
// may be left.
func TestStopBeforeEvaluation(t *testing.T) {
	dir, _ := newKept(t)
	ask := func(c backends.Choice) (device.Device, string, error) {
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			return nil, "", err
		}
		return backends.Open(c)
	}
	var found []error
	said := onLine(func(line string) {
		if strings.Contains(line, "eval_loss") {
			_, err := os.Stat(filepath.Join(dir, "out", "checkpoints", "step-00000001", "manifest.json"))
			found = append(found, err)
		}
	})
	err := Run(Options{Path: filepath.Join(dir, "job.toml"),
		Sets: []string{"train.steps=1000", "eval.every=1", "eval.split=0.3"}, Stdout: io.Discard, Stderr: said,
		open: opener{ask, backends.OpenComm, nil}})
	if status.Of(err) != status.Preempted || len(found) != 1 || found[0] != nil {
		t.Errorf("%v, and at each evaluation the checkpoint: %v", err, found)
	}
}

// The command that resumes a run is the run's own command, quoted for a shell. If that would not
// resume from the newest checkpoint, it has a key more.
func TestCommand(t *testing.T) {
	job := &Env{Job: &file.Job{Path: "a b/it's.toml"}, sets: []string{"seed=2", `data.path=["x"]`},
		world: comm.Local(3)[0]}
	if got, want := job.command(),
		os.Args[0]+` 'a b/it'\''s.toml' --set seed=2 --set 'data.path=["x"]' --ranks 3`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	job.args = []string{"ulysses-mpi", "job.toml", "-n", "2", ""}
	for resume, more := range map[string]string{"auto": "", "off": " --set checkpoint.resume=auto",
		"out/checkpoints/step-00000002": " --set checkpoint.resume=auto"} {
		job.Job.Checkpoint.Resume = resume
		if got, want := job.command(), "ulysses-mpi job.toml -n 2 ''"+more; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
