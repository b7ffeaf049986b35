package job

import (
	"fmt"
	"slices"
	"strings"

	"ulysses/job/file"
	"ulysses/job/report"
)

// variableNotes returns a note on each variable of an environment that has no effect in this run:
// its name is misspelled, or it is for another kind of device. A name that resembles none may be
// the user's own, such as a variable that the job file reads.
func variableNotes(environment []string, kind string) (notes []string) {
	const ours = "ULYSSES_"
	known := report.OwnVariables()
	for i, name := range known {
		known[i] = strings.ToLower(strings.TrimPrefix(name, ours))
	}
	for _, v := range environment {
		name, value, _ := strings.Cut(v, "=")
		short := strings.ToLower(strings.TrimPrefix(name, ours))
		switch near := file.Nearest(short, known); {
		case !strings.HasPrefix(name, ours) || value == "":
		case !slices.Contains(known, short) && near != "":
			notes = append(notes, fmt.Sprintf("%s in the environment has no effect; did you mean %s%s?", name, ours,
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
