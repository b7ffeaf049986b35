// Package slurm reads what a launcher (Slurm, Open MPI, MPICH) tells its processes in the
// environment: the number of processes, the rank of this process, and its node.
package slurm

import (
	"os"
	"strconv"
	"strings"
	"time"

	"ulysses/internal/status"
)

// Environment is one process as its launcher sees it. Zero means that the launcher does not say.
type Environment struct {
	// "mpirun (Open MPI)", "mpiexec (MPICH)", "srun", or "" for a process started alone
	Launcher  string
	Tasks     int // processes launched together
	Rank      int
	LocalRank int // among those of this node
	LocalSize int
	Nodes     int
	Node      int    // index of this node
	Host      string // as the launcher names it, else as the system does
	JobID     string // of Slurm; also set in a shell inside an allocation
	StepID    string
	Restarts  int       // how often Slurm has requeued the job
	End       time.Time // when Slurm ends the job; zero where it does not say
	// the launcher left something by which an MPI library can find its peers: PMIx, PMI, Open MPI's
	// own
	Wired bool
}

// Env reads the environment of this process.
func Env() Environment {
	e := read(os.Getenv)
	if e.Host == "" {
		e.Host, _ = os.Hostname()
	}
	return e
}

// launchers are asked in this order. Open MPI's and MPICH's own variables come first: under mpirun
// inside an allocation Slurm's step counts the launcher's daemons, not the processes.
var launchers = []struct{ name, size, rank, localRank, localSize string }{
	{"mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
	{"mpiexec (MPICH)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
	{"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", ""},
}

func read(get func(string) string) Environment {
	number := func(name string) int {
		n, err := strconv.Atoi(get(name))
		if name == "" || err != nil || n < 0 {
			return 0
		}
		return n
	}
	e := Environment{Host: get("SLURMD_NODENAME"), JobID: get("SLURM_JOB_ID"), StepID: get("SLURM_STEP_ID"), Restarts: number("SLURM_RESTART_COUNT"),
		Nodes: number("SLURM_STEP_NUM_NODES"), Node: number("SLURM_NODEID")}
	if n := number("SLURM_JOB_END_TIME"); n > 0 {
		e.End = time.Unix(int64(n), 0)
	}
	e.Wired = get("PMIX_RANK") != "" || get("PMI_RANK") != "" || get("OMPI_COMM_WORLD_SIZE") != ""
	for _, l := range launchers {
		if n := number(l.size); n > 0 {
			e.Launcher, e.Tasks, e.Rank, e.LocalRank, e.LocalSize = l.name, n, number(l.rank), number(l.localRank), number(l.localSize)
			break
		}
	}
	// srun --mpi=pmi2 sets PMI_SIZE as mpiexec does; Slurm's own variables tell them apart and know
	// the node.
	if e.Launcher == "mpiexec (MPICH)" && number("SLURM_STEP_NUM_TASKS") == e.Tasks {
		e.Launcher, e.LocalRank = "srun", number("SLURM_LOCALID")
	}
	if e.Launcher == "srun" && e.LocalSize == 0 {
		e.LocalSize = tasksOn(get("SLURM_STEP_TASKS_PER_NODE"), e.Node)
	}
	return e
}

// tasksOn reads Slurm's list of tasks by node, such as "4(x2),3": four on each of the first two
// nodes, three on the third.
func tasksOn(list string, node int) int {
	for _, part := range strings.Split(list, ",") {
		count, times, repeated := strings.Cut(part, "(x")
		n, err := strconv.Atoi(count)
		if err != nil {
			return 0
		}
		nodes := 1
		if repeated {
			if nodes, err = strconv.Atoi(strings.TrimSuffix(times, ")")); err != nil {
				return 0
			}
		}
		if node < nodes {
			return n
		}
		node -= nodes
	}
	return 0
}

// Ready refuses what can be told before MPI starts: without a way to its peers Open MPI ends the
// process in MPI_Init with a page about its own build, and MPICH makes it rank 0 of 1.
func (e Environment) Ready(mpiBuilt bool) error {
	if !mpiBuilt {
		return e.Check(1, false)
	}
	if e.Tasks > 1 && !e.Wired {
		return status.Errorf(status.InvalidArgument, "launch: %s started %d tasks without PMIx or PMI, so they cannot find each other: use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)",
			e.Launcher, e.Tasks)
	}
	return nil
}

// Check holds what the launcher says against the size of the world that this program found. A
// launcher that this program cannot talk to would otherwise start copies that all believe to be the
// only rank, and write the same files. worldSize is 1 without MPI.
func (e Environment) Check(worldSize int, mpiBuilt bool) error {
	switch {
	case e.Tasks <= 1 || worldSize == e.Tasks:
		return nil
	case !mpiBuilt:
		return status.Errorf(status.InvalidArgument, "launch: %s started %d tasks, but this program was built without MPI and each would run the whole job: build it with -tags mpi, or start one process with --ranks %d",
			e.Launcher, e.Tasks, e.Tasks)
	case worldSize == 1:
		return status.Errorf(status.InvalidArgument, "launch: %s launched %d tasks but MPI sees 1: wrong --mpi or wrong mpirun: use the mpirun of the MPI library this program is linked with, or srun --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH)",
			e.Launcher, e.Tasks)
	}
	return status.Errorf(status.InvalidArgument, "launch: %s launched %d tasks but MPI sees %d: start all ranks with one launcher", e.Launcher, e.Tasks, worldSize)
}
