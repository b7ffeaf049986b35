package job

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"ulysses/internal/status"
)

// exitCodes describes each exit code of the program; docs/job-file.md has the same table.
var exitCodes = []exitCode{
	{status.OK, "success"},
	{status.InvalidArgument, "the command line is wrong"},
	{status.InvalidConfig, "the job file, the model or the data is wrong"},
	{status.Unsupported, "the job is valid but needs something that is not built"},
	{status.OutOfMemory, "the job does not fit into memory"},
	{status.Comm, "communication failed: a rank is late, has died or has other arguments"},
	{status.Device, "the device or one of its libraries failed"},
	{status.IO, "a file could not be read or written"},
	{status.Numeric, "a value is NaN or Inf, or verify found a difference"},
	{status.Internal, "the program has an error; please report it"},
	{status.Preempted, "the run was stopped early with a checkpoint; run the same command again to resume"},
	{status.NothingToRun, "there was nothing to run on, for example no GPU"},
}

type exitCode struct {
	code    status.Code
	meaning string
}

const rootLong = `Trains transformers on sequences that are sharded over ranks (DeepSpeed-Ulysses), on MPI and Slurm.
Under mpirun or srun each process is one rank. Without a launcher, --ranks N runs N ranks in one
process.`

// writeHelp writes the help text of a command: usage, flags, an example, exit codes.
func writeHelp(w io.Writer, cmd *cobra.Command) {
	long := cmd.Long
	if !cmd.HasParent() {
		long = rootLong
		fmt.Fprint(w, "usage: ulysses-mpi [run] job.toml [flags]\n       ulysses-mpi verb ... [flags]\n")
	} else {
		fmt.Fprintf(w, "usage: %s", cmd.UseLine())
		if v := verbOf(cmd.Name()); v != nil && v.hasFlags() {
			fmt.Fprint(w, " [flags]")
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "\n%s\n", strings.TrimSpace(long))
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintln(w, "\nverbs (for details: ulysses-mpi verb --help):")
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				fmt.Fprintf(table, "  %s\t%s\n", sub.Use, sub.Short)
			}
		}
		table.Flush()
	}
	if flags := cmd.LocalFlags(); flags.HasAvailableFlags() {
		fmt.Fprintf(w, "\nflags:\n%s", flags.FlagUsagesWrapped(100))
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\nexample:\n  %s\n", strings.ReplaceAll(strings.TrimSpace(cmd.Example), "\n", "\n  "))
	}
	writeExitCodes(w, cmd)
	if !cmd.HasParent() {
		fmt.Fprintln(w, "\nThe keys of a job file are in docs/job-file.md.")
	}
}

// writeExitCodes lists the exit codes of a verb; for the root it lists all.
func writeExitCodes(w io.Writer, cmd *cobra.Command) {
	v := verbOf(cmd.Name())
	if cmd.HasParent() && v == nil {
		return
	}
	fmt.Fprintln(w, "\nexit codes:")
	for _, x := range exitCodes {
		if !cmd.HasParent() || x.code == status.InvalidArgument || slices.Contains(v.codes, x.code) {
			fmt.Fprintf(w, "  %2d  %s\n", x.code, x.meaning)
		}
	}
}
