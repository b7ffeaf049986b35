package launch

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"ulysses/slurm"
)

// The time of reading the model, 25 minutes of an hour, does not count as a step. Two steps of 18
// minutes do not fit into the remaining time.
func TestStopAfterLongStart(t *testing.T) {
	x, err := NewStopper("1h", new(Signals), time.Now().Add(-25*time.Minute), nil)
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
	x, err := NewStopper("1h", new(Signals), time.Now().Add(-40*time.Minute), nil)
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

// An end of the job that has passed is not the current one. It does not stop each run after a step.
func TestEndThatHasPassed(t *testing.T) {
	start := time.Now()
	for ago, want := range map[time.Duration]bool{-5 * time.Second: true, -time.Hour: false, time.Hour: false} {
		t.Setenv("SLURM_JOB_END_TIME", strconv.FormatInt(start.Add(-ago).Unix(), 10))
		warnings := 0
		x, err := NewStopper("auto", new(Signals), start, func(text string) {
			warnings++
			if !strings.Contains(text, " before the start, so the run has no time limit; set for example ") {
				t.Error(text)
			}
		})
		if err != nil || (warnings > 0) != (ago > 0) {
			t.Fatalf("%v: %d warnings, %v", ago, warnings, err)
		}
		x.last = x.last.Add(-10 * time.Second) // a step of 10 s
		if got := x.Now(); got != want {
			t.Errorf("the end was %v ago: stops: %v", ago, got)
		}
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
		{slurm.Environment{Launcher: "srun", Tasks: 8, Nodes: 2}, func(string) string { return "pmix" },
			"srun -N 2 -n 8 --mpi=pmix"},
		{slurm.Environment{Launcher: "srun", Tasks: 8}, none, "srun -n 8"},
	} {
		if got := shellWords(launcherWords(x.env, x.get)); got != x.want {
			t.Errorf("%v: %s, want %s", x.env, got, x.want)
		}
	}
}

// A task that waits for others to start MPI says so: the first one with the names of the others if
// the tasks share a folder, otherwise the first two.
func TestWarningOfMissingTasks(t *testing.T) {
	t.Setenv("PMIX_NAMESPACE", "job.1")
	parent := t.TempDir()
	folder := filepath.Join(parent, "runs", "out")
	task := func(rank int) slurm.Environment {
		return slurm.Environment{Launcher: "mpirun (Open MPI)", Tasks: 3, Rank: rank}
	}
	check := func(rank int, here *presence, timeout time.Duration, want string) {
		t.Helper()
		if got := waiting(task(rank), here, timeout); got != want {
			t.Errorf("rank %d: %q, want %q", rank, got, want)
		}
	}
	const unknown = ": not all 3 tasks of mpirun (Open MPI) have started MPI after 45s; start the same command on each task (this task waits "
	check(0, nil, 10*time.Minute, "rank 0"+unknown+"for 10m0s)")
	check(1, nil, 0, "rank 1"+unknown+"without a limit)")
	check(2, nil, 0, "")
	one, two := appear(task(1), folder), appear(task(2), folder)
	check(1, one, 10*time.Minute, "1 task has not started: task 0; the other tasks wait for 10m0s")
	check(1, one, 0, "1 task has not started: task 0; the other tasks wait without a limit")
	check(2, two, 0, "")
	zero := appear(task(0), folder)
	check(0, zero, 0, "")
	// The owner of the folder has removed the files: no task is named.
	other := appear(task(0), parent)
	if err := RemoveLeft(parent); err != nil {
		t.Fatal(err)
	}
	check(0, other, 10*time.Minute, "rank 0"+unknown+"for 10m0s)")
	// Task 1, which has created the folders, does not leave last.
	for _, p := range []*presence{zero, one, two} {
		p.leave()
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("the tasks leave %v (%v)", left, err)
	}
	mine := filepath.Join(parent, "mine") // a folder that exists stays
	if err := os.Mkdir(mine, 0o777); err != nil {
		t.Fatal(err)
	}
	appear(task(0), mine).leave()
	if left, err := os.ReadDir(mine); err != nil || len(left) > 0 {
		t.Errorf("the task leaves %v (%v)", left, err)
	}
}
