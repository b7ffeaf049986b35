// Package slurm reads the environment variables that a launcher (Slurm, Open MPI, MPICH) sets for
// its processes: the number of processes, the rank of this process, and its node.
//
// Env returns an Environment. Ready checks it before MPI starts, and Check compares it with the
// number of ranks that MPI has found.
package slurm

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"ulysses/internal/status"
)

// Environment describes a process as its launcher does. Zero means that the launcher does not set
// the value.
type Environment struct {
	// "mpirun (Open MPI)", "mpiexec (MPICH)", "srun", or "" for a process without a launcher
	Launcher  string
	Tasks     int // processes launched together
	Rank      int
	LocalRank int // index of this process on its node
	LocalSize int // processes on this node
	CPUs      int // of Slurm's step on this node, for all its processes; 0 outside of Slurm
	Nodes     int
	Node      int    // index of this node
	Host      string // the launcher's name of this node, else the system's
	JobID     string // Slurm's; also set in a shell inside an allocation
	JobTasks  int    // tasks, or else nodes, for which the allocation was made; 0 outside of Slurm
	StepID    string
	Restarts  int       // how often Slurm has requeued the job
	End       time.Time // when Slurm ends the job
	// Wired: the launcher has set variables of PMIx, PMI or Open MPI, by which an MPI library finds
	// the other processes.
	Wired bool
	// Sizeless is a variable with its value, such as "PMIX_RANK=2", by which a launcher has
	// numbered this process, if no variable has the number of processes; otherwise "".
	Sizeless string
}

// Env returns the environment of this process. Host is always set.
func Env() Environment {
	e := read(os.Getenv)
	if e.Host == "" {
		e.Host, _ = os.Hostname()
	}
	return e
}

// launchers are the launchers with their variables, in the order of search. Open MPI's and MPICH's
// variables come first: for mpirun inside an allocation, Slurm's step counts the daemons of mpirun,
// not the processes.
var launchers = []struct{ name, size, rank, localRank, localSize string }{
	{"mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
		"OMPI_COMM_WORLD_LOCAL_SIZE"},
	{"mpiexec (MPICH)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
	{"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", ""},
}

// SizeVariable returns the variable with the number of tasks of the launcher.
func (e Environment) SizeVariable() string {
	for _, l := range launchers {
		if l.name == e.Launcher {
			return l.size
		}
	}
	return ""
}

func read(get func(string) string) Environment {
	number := func(name string) int {
		n, err := strconv.Atoi(get(name))
		if name == "" || err != nil || n < 0 {
			return 0
		}
		return n
	}
	e := Environment{Host: get("SLURMD_NODENAME"), JobID: get("SLURM_JOB_ID"), StepID: get("SLURM_STEP_ID"),
		Restarts: number("SLURM_RESTART_COUNT"), Nodes: number("SLURM_STEP_NUM_NODES"), Node: number("SLURM_NODEID")}
	e.CPUs = number("SLURM_CPUS_ON_NODE")
	e.JobTasks = max(number("SLURM_NTASKS"), number("SLURM_JOB_NUM_NODES"))
	if n := number("SLURM_JOB_END_TIME"); n > 0 {
		e.End = time.Unix(int64(n), 0)
	}
	e.Wired = get("PMIX_RANK") != "" || get("PMI_RANK") != "" || get("OMPI_COMM_WORLD_SIZE") != ""
	for _, name := range []string{"PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"} {
		if rank := get(name); rank != "" && e.Sizeless == "" {
			e.Sizeless = name + "=" + rank
		}
	}
	for _, l := range launchers {
		if n := number(l.size); n > 0 {
			e.Launcher, e.Tasks, e.Rank, e.LocalRank, e.LocalSize = l.name, n, number(l.rank), number(l.localRank),
				number(l.localSize)
			e.Sizeless = ""
			break
		}
	}
	// srun --mpi=pmi2 and mpiexec both set PMI_SIZE. If Slurm's variables have the same number of
	// tasks, the launcher is srun.
	if e.Launcher == "mpiexec (MPICH)" && number("SLURM_STEP_NUM_TASKS") == e.Tasks {
		e.Launcher, e.LocalRank = "srun", number("SLURM_LOCALID")
	}
	if e.Launcher == "srun" && e.LocalSize == 0 {
		e.LocalSize = tasksOn(get("SLURM_STEP_TASKS_PER_NODE"), e.Node)
	}
	return e
}

// tasksOn returns the number of tasks on a node, from Slurm's list of tasks by node. In "4(x2),3"
// there are four tasks on each of the first two nodes, and three on the third. An invalid list
// gives 0.
func tasksOn(list string, node int) int {
	for _, entry := range strings.Split(list, ",") {
		count, times, repeated := strings.Cut(entry, "(x")
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

// NodeOf returns the index of the node of a task, if tasks are placed node by node, from Slurm's
// list of tasks by node; -1 if the list does not have the task.
func NodeOf(task int, list string) int {
	for node := 0; ; node++ {
		n := tasksOn(list, node)
		if n == 0 {
			return -1
		}
		if task < n {
			return node
		}
		task -= n
	}
}

// Alone returns the warning for a process that nothing has launched, in an allocation for several
// tasks; "" for other processes.
func (e Environment) Alone() string {
	if e.Launcher != "" || e.JobID == "" || e.JobTasks <= 1 {
		return ""
	}
	return fmt.Sprintf(
		"launch: one rank on %s runs the whole job, although job %s of Slurm is for %d tasks; to use them, start the program with srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH) or mpirun",
		e.Host, e.JobID, e.JobTasks)
}

// UsePMI is the fix for an srun whose tasks do not find each other.
const UsePMI = "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"

// Ready returns an error if MPI would not find the other processes. It is called before MPI starts:
// there, Open MPI would end the process with a long message about its build, and MPICH would make
// each process rank 0 of 1. mpiBuilt says whether the program was built with MPI.
func (e Environment) Ready(mpiBuilt bool) error {
	if e.Sizeless != "" {
		name, _, _ := strings.Cut(e.Sizeless, "=")
		return status.Errorf(status.InvalidArgument,
			"launch: a launcher has set %s, but no number of tasks in OMPI_COMM_WORLD_SIZE, PMI_SIZE or SLURM_STEP_NUM_TASKS, so each task would run the whole job; start the program with all variables of the launcher, or, to run one process alone, unset %s",
			e.Sizeless, name)
	}
	if !mpiBuilt {
		return e.Check(1, false)
	}
	if e.Tasks > 1 && !e.Wired {
		return status.Errorf(status.InvalidArgument,
			"launch: %s started %d tasks without PMIx or PMI, so they cannot find each other; %s",
			e.Launcher, e.Tasks, UsePMI)
	}
	return nil
}

// Check returns an error if the launcher has started another number of processes than worldSize,
// the number of ranks in MPI_COMM_WORLD (1 without MPI). Otherwise, with a launcher of another MPI
// library, each process would run the whole job as the only rank, and write the same files.
func (e Environment) Check(worldSize int, mpiBuilt bool) error {
	switch {
	case e.Tasks <= 1 || worldSize == e.Tasks:
		return nil
	case !mpiBuilt:
		return status.Errorf(status.InvalidArgument,
			"launch: %s started %d tasks, but this program was built without MPI and each would run the whole job; build it with -tags mpi, or start one process with --ranks %d",
			e.Launcher, e.Tasks, e.Tasks)
	case worldSize == 1:
		return status.Errorf(status.InvalidArgument,
			"launch: %s started %d tasks, but MPI found 1 rank (wrong --mpi or wrong mpirun); use the mpirun of the MPI library that this program is linked with, or srun --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH)",
			e.Launcher, e.Tasks)
	}
	return status.Errorf(status.InvalidArgument,
		"launch: %s started %d tasks, but MPI found %d ranks; start all ranks with one launcher", e.Launcher, e.Tasks,
		worldSize)
}
