package job

import (
	"fmt"
	"slices"
	"strings"

	"ulysses/job/file"
)

// knownVariables are the environment variables that a user may set for a run, without "ULYSSES_"
// and in lower case.
var knownVariables = []string{"isa", "cuda_plugin", "mpi_cuda", "kernel", "nvidia_root", "timeout", "fault", "mpi_shim",
	"srun_mpi"}

// variableNotes returns a note on each variable of an environment that has no effect in this run:
// its name is misspelled, or it is for another kind of device. A name that resembles none may be
// the user's own, such as a variable that the job file reads.
func variableNotes(environment []string, kind string) (notes []string) {
	for _, v := range environment {
		name, value, _ := strings.Cut(v, "=")
		short, ours := strings.CutPrefix(name, "ULYSSES_")
		short = strings.ToLower(short)
		switch near := file.Nearest(short, knownVariables); {
		case !ours || value == "":
		case !slices.Contains(knownVariables, short) && near != "":
			notes = append(notes, fmt.Sprintf("%s in the environment has no effect; did you mean ULYSSES_%s?", name,
				strings.ToUpper(near)))
		case kind == "cpu" && short == "kernel":
			notes = append(notes, fmt.Sprintf("%s=%s in the environment has no effect, because this run uses the CPU; "+
				"ULYSSES_ISA selects the kernels there", name, value))
		case kind == "cpu" && short == "mpi_cuda":
			notes = append(notes, fmt.Sprintf("%s=%s in the environment has no effect, because this run uses the CPU",
				name, value))
		}
	}
	slices.Sort(notes)
	return notes
}
