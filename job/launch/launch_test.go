package launch

import (
	"testing"
	"time"

	"ulysses/slurm"
)

// The time of reading the model, 25 minutes of an hour, does not count as a step. Two steps of 18
// minutes do not fit into the remaining time.
func TestStopAfterLongStart(t *testing.T) {
	x, err := NewStopper("1h", new(Signals), time.Now().Add(-25*time.Minute))
	if err != nil || x.Now() {
		t.Errorf("35 minutes remain and the steps are short: the run stopped, or %v", err)
	}
	x.last = x.last.Add(-18 * time.Minute)
	if !x.Now() {
		t.Error("two steps of 18 minutes do not fit into 35, and the run did not stop")
	}
}

// The time of a checkpoint is kept free twice before the limit.
func TestStopLeavesTimeForACheckpoint(t *testing.T) {
	x, err := NewStopper("1h", new(Signals), time.Now().Add(-40*time.Minute))
	if err != nil || x.Now() {
		t.Errorf("20 minutes remain: the run stopped, or %v", err)
	}
	x.Saved(9 * time.Minute)
	x.Saved(time.Minute)
	if x.Now() {
		t.Error("a checkpoint of 9 minutes fits twice into 20, and the run stopped")
	}
	x.Saved(11 * time.Minute)
	if !x.Now() {
		t.Error("a checkpoint of 11 minutes does not fit twice into 20, and the run did not stop")
	}
}

// If the launcher's command line cannot be read, the command has a launcher with the same number of
// tasks.
func TestLauncherWords(t *testing.T) {
	none := func(string) string { return "" }
	for _, x := range []struct {
		env  slurm.Environment
		get  func(string) string
		want string
	}{
		{slurm.Environment{Launcher: "mpirun (Open MPI)", Tasks: 4}, none, "mpirun -n 4"},
		{slurm.Environment{Launcher: "mpiexec (MPICH)", Tasks: 4}, none, "mpiexec -n 4"},
		{slurm.Environment{Launcher: "srun", Tasks: 8, Nodes: 2}, func(string) string { return "pmix" }, "srun -N 2 -n 8 --mpi=pmix"},
		{slurm.Environment{Launcher: "srun", Tasks: 8}, none, "srun -n 8"},
	} {
		if got := shellWords(launcherWords(x.env, x.get)); got != x.want {
			t.Errorf("%v: %s, want %s", x.env, got, x.want)
		}
	}
}
