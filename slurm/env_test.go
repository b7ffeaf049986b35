package slurm

import (
	"strings"
	"testing"

	"ulysses/internal/status"
)

func TestRead(t *testing.T) {
	for name, c := range map[string]struct {
		env  map[string]string
		want Environment
	}{
		"alone": {nil, Environment{}},
		"garbage": {map[string]string{"OMPI_COMM_WORLD_SIZE": "four", "PMI_SIZE": "-2", "SLURM_STEP_NUM_TASKS": ""},
			Environment{Wired: true}},
		"no size": {map[string]string{"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "abc", "SLURM_PROCID": "2"},
			Environment{Wired: true, Sizeless: "PMIX_RANK=2"}},
		"mpirun": {map[string]string{"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3",
			"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
			Environment{Launcher: "mpirun (Open MPI)", Tasks: 4, Rank: 3, LocalRank: 1, LocalSize: 2, Wired: true}},
		"mpirun in an allocation": {map[string]string{"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7",
			"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1",
			"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n2"},
			Environment{Launcher: "mpirun (Open MPI)", Tasks: 8, Rank: 7, Nodes: 2, Node: 1, JobID: "17", Host: "n2",
				Wired: true}},
		"mpiexec": {map[string]string{"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"},
			Environment{Launcher: "mpiexec (MPICH)", Tasks: 3, Rank: 2, LocalRank: 2, LocalSize: 3, Wired: true}},
		"srun pmix": {map[string]string{"SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
			"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_JOB_ID": "9",
			"SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2", "PMIX_RANK": "5"},
			Environment{Launcher: "srun", Tasks: 7, Rank: 5, LocalRank: 1, LocalSize: 3, Nodes: 2, Node: 1, JobID: "9",
				StepID: "0", Restarts: 2, Wired: true}},
		"srun pmi2": {map[string]string{"PMI_SIZE": "8", "PMI_RANK": "2", "SLURM_STEP_NUM_TASKS": "8",
			"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
			"SLURM_CPUS_ON_NODE": "16"},
			Environment{Launcher: "srun", Tasks: 8, Rank: 2, LocalRank: 2, LocalSize: 4, CPUs: 16, Wired: true}},
		"srun none": {map[string]string{"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
			"SLURM_STEP_TASKS_PER_NODE": "4"},
			Environment{Launcher: "srun", Tasks: 4, Rank: 1, LocalRank: 1, LocalSize: 4}},
		"shell in an allocation": {map[string]string{"SLURM_JOB_ID": "9", "SLURM_NTASKS": "8"},
			Environment{JobID: "9", JobTasks: 8}},
	} {
		if got := read(func(k string) string { return c.env[k] }); got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, c.want)
		}
	}
}

func TestTasksOn(t *testing.T) {
	for _, c := range []struct {
		list string
		node int
		want int
	}{{"4(x2),3", 0, 4}, {"4(x2),3", 1, 4}, {"4(x2),3", 2, 3}, {"4(x2),3", 3, 0}, {"", 0, 0}, {"4(xz)", 0, 0},
		{"x", 0, 0}, {"5", 0, 5}} {
		if got := tasksOn(c.list, c.node); got != c.want {
			t.Errorf("tasksOn(%q, %d) = %d, want %d", c.list, c.node, got, c.want)
		}
	}
}

func TestNodeOf(t *testing.T) {
	for task, want := range []int{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, -1, -1} {
		if got := NodeOf(task, "4(x2),3"); got != want {
			t.Errorf("task %d: node %d, want %d", task, got, want)
		}
	}
	if got := NodeOf(0, ""); got != -1 {
		t.Error(got)
	}
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		tasks, world int
		mpi          bool
		text         string
	}{
		{0, 1, true, ""}, {0, 1, false, ""}, {1, 1, false, ""}, {4, 4, true, ""},
		{4, 1, false, "mpirun (Open MPI) started 4 tasks, but this program was built without MPI"},
		{4, 1, true, "started 4 tasks, but MPI found 1 rank (wrong --mpi or wrong mpirun)"},
		{4, 2, true, "started 4 tasks, but MPI found 2 ranks"},
	} {
		err := Environment{Launcher: "mpirun (Open MPI)", Tasks: c.tasks}.Check(c.world, c.mpi)
		if c.text == "" && err != nil || c.text != "" &&
			(status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestReady(t *testing.T) {
	for _, c := range []struct {
		tasks int
		wired bool
		mpi   bool
		text  string
	}{
		{0, false, true, ""}, {1, false, true, ""}, {0, false, false, ""}, {1, true, false, ""}, {4, true, true, ""},
		{4, false, true, "srun started 4 tasks without PMIx or PMI"},
		{4, true, false, "built without MPI"},
	} {
		err := Environment{Launcher: "srun", Tasks: c.tasks, Wired: c.wired}.Ready(c.mpi)
		if c.text == "" && err != nil || c.text != "" &&
			(status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// Without the number of tasks, each task of a launcher would run the whole job.
func TestReadyWithoutASize(t *testing.T) {
	for _, mpi := range []bool{false, true} {
		err := read(func(name string) string { return map[string]string{"PMIX_RANK": "2"}[name] }).Ready(mpi)
		want := "launch: a launcher has set PMIX_RANK=2, but no number of tasks"
		if status.Of(err) != status.InvalidArgument || !strings.HasPrefix(err.Error(), want) ||
			!strings.HasSuffix(err.Error(), "unset PMIX_RANK") {
			t.Errorf("with MPI: %v: %v", mpi, err)
		}
	}
}

// A program without a launcher in an allocation for several tasks leaves most of it idle.
func TestAlone(t *testing.T) {
	for text, env := range map[string]map[string]string{
		"one rank on n1 runs the whole job, although job 9 of Slurm is for 8 tasks": {"SLURM_JOB_ID": "9",
			"SLURM_NTASKS": "8", "SLURMD_NODENAME": "n1"},
		"job 9 of Slurm is for 2 tasks": {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2"},
		"":                              {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
	} {
		if got := read(func(k string) string { return env[k] }).Alone(); !strings.Contains(got, text) ||
			text == "" && got != "" {
			t.Errorf("%v: %q, want %q", env, got, text)
		}
	}
	for _, launched := range []Environment{{JobTasks: 8}, {JobID: "9", JobTasks: 8, Launcher: "srun", Tasks: 1}} {
		if got := launched.Alone(); got != "" {
			t.Errorf("%+v: %q", launched, got)
		}
	}
}

func TestEnvHost(t *testing.T) {
	t.Setenv("SLURMD_NODENAME", "n7")
	if h := Env().Host; h != "n7" {
		t.Errorf("host %q", h)
	}
	t.Setenv("SLURMD_NODENAME", "")
	if Env().Host == "" {
		t.Error("no host")
	}
}
