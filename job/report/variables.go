package report

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// shownVariables lists the environment variables whose values a report shows. It is a list of
// allowed names, because no list of a site's secrets is complete. The values are numbers, names of
// nodes and devices, and settings of libraries.
var shownVariables = strings.Fields(`
ULYSSES_CUDA_PLUGIN ULYSSES_FAULT ULYSSES_ISA ULYSSES_KERNEL ULYSSES_MPI_CUDA ULYSSES_MPI_SHIM ULYSSES_NVIDIA_ROOT ULYSSES_SRUN_MPI ULYSSES_TIMEOUT
SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_ID SLURM_CLUSTER_NAME SLURM_CPUS_ON_NODE SLURM_CPUS_PER_GPU SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_CPU_BIND_TYPE
SLURM_DISTRIBUTION SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_HINT SLURM_JOBID SLURM_JOB_CPUS_PER_NODE SLURM_JOB_END_TIME
SLURM_JOB_GPUS SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_JOB_QOS SLURM_JOB_START_TIME SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID
SLURM_MEM_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_MPI_TYPE SLURM_NNODES SLURM_NODEID SLURM_NODELIST SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_CORE
SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_SOCKET SLURM_PROCID SLURM_RESTART_COUNT SLURM_STEP_GPUS SLURM_STEP_ID SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES
SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_THREADS_PER_CORE SLURM_TOPOLOGY_ADDR
CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES GOGC GOMAXPROCS GOMEMLIMIT OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND
NCCL_ALGO NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_NET NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME
OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_SIZE OMPI_MCA_btl OMPI_MCA_btl_tcp_if_include OMPI_MCA_pml UCX_NET_DEVICES UCX_TLS`)

// OwnVariables returns the names of the variables of this program that a user may set. All are in
// docs/job-file.md.
func OwnVariables() (names []string) {
	for _, name := range shownVariables {
		if strings.HasPrefix(name, "ULYSSES_") {
			names = append(names, name)
		}
	}
	return names
}

// variables returns the environment of rank 0, limited to shownVariables.
func variables() (rows []factRow) {
	hidden := 0
	for _, v := range os.Environ() {
		switch name, value, _ := strings.Cut(v, "="); {
		case slices.Contains(shownVariables, name):
			rows = append(rows, factRow{name, value, ""})
		case strings.HasPrefix(name, "ULYSSES_") || strings.HasPrefix(name, "SLURM_"):
			hidden++
		}
	}
	slices.SortFunc(rows, func(a, b factRow) int { return strings.Compare(a.Name, b.Name) })
	if hidden > 0 {
		rows = append(rows,
			factRow{"other variables", fmt.Sprintf("%d of SLURM_ and ULYSSES_", hidden),
				"values not shown: they may be secret"})
	}
	return rows
}
