package cluster

import (
	"slices"
	"strings"
)

var (
	// networkPrefixes start the names of variables that configure the network.
	networkPrefixes = []string{"UCX_", "NCCL_", "OMPI_MCA_", "PRTE_MCA_", "FI_", "PSM2_", "PSM3_", "MPIR_CVAR_",
		"MPICH_"}
	// ofLauncher start the names of variables that Open MPI's launcher sets for each process.
	ofLauncher = []string{"OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_MCA_prte_", "OMPI_MCA_initial_wdir",
		"OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_shmem_RUNTIME_QUERY_hint", "PRTE_MCA_prte_", "PRTE_MCA_ess"}
	// ownVariables are variables of this program that change what a rank computes or sends.
	ownVariables = []string{"ULYSSES_CUDA_PLUGIN", "ULYSSES_ISA", "ULYSSES_KERNEL", "ULYSSES_MPI_CUDA",
		"ULYSSES_TIMEOUT"}
)

// Variables returns the variables of an environment that should be the same on all ranks: they
// configure the network or this program.
func Variables(environment []string) map[string]string {
	starts := func(name string, prefixes []string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
	}
	found := map[string]string{}
	for _, v := range environment {
		name, value, _ := strings.Cut(v, "=")
		if slices.Contains(ownVariables, name) || starts(name, networkPrefixes) && !starts(name, ofLauncher) {
			found[name] = value
		}
	}
	return found
}
