package launch

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"ulysses/internal/proc"
	"ulysses/slurm"
)

// Command returns the command line that starts this job again, quoted for a shell: args, the
// program and its arguments, behind the launcher's own arguments. If these cannot be read, Command
// uses a launcher with the same number of tasks.
func Command(args []string) string {
	env := slurm.Env()
	if env.Tasks > 1 {
		if whole := launcherCommand(os.Getppid()); whole != nil {
			args = whole
		} else {
			args = append(launcherWords(env, os.Getenv), args...)
		}
	}
	return shellWords(args)
}

// launcherWords returns the arguments that start the current number of tasks.
func launcherWords(env slurm.Environment, getenv func(string) string) []string {
	n := strconv.Itoa(env.Tasks)
	if env.Launcher != "srun" {
		return []string{strings.Fields(env.Launcher)[0], "-n", n}
	}
	words := []string{"srun"}
	if env.Nodes > 0 {
		words = append(words, "-N", strconv.Itoa(env.Nodes))
	}
	words = append(words, "-n", n)
	if kind := getenv("SLURM_MPI_TYPE"); kind != "" {
		words = append(words, "--mpi="+kind)
	}
	return words
}

// launcherCommand returns the command line of mpirun if mpirun is an ancestor of the process pid,
// as on the node where mpirun itself runs; otherwise nil.
func launcherCommand(pid int) (words []string) {
	left := 3
	ancestors(pid, func(cmd []string) bool {
		name := filepath.Base(cmd[0])
		for _, l := range []string{"mpirun", "mpiexec", "orterun", "prterun"} {
			if name == l || strings.HasPrefix(name, l+".") {
				// mpirun of Open MPI 5 replaces itself by prterun, which has other options.
				if tool := os.Getenv("OMPI_TOOL_NAME"); name == "prterun" && tool != "" {
					cmd[0] = filepath.Join(filepath.Dir(cmd[0]), tool)
				}
				words = cmd
			}
		}
		left--
		return words == nil && left > 0
	})
	return words
}

// ancestors calls f with the command line of the process pid, of its parent, and so on, until f
// returns false. It reports whether it has come to the first process: some systems hide the
// processes of other users.
func ancestors(pid int, f func(cmd []string) bool) bool {
	for ; pid > 0; pid = parent(pid) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || len(text) == 0 || !f(strings.Split(string(bytes.TrimSuffix(text, []byte{0})), "\x00")) {
			return false
		}
		if pid == 1 {
			return true
		}
	}
	return false
}

// parent returns the parent of a process; 0 = unknown.
func parent(pid int) int {
	fields := proc.Stat(pid) // state, parent, ...
	if len(fields) < 2 {
		return 0
	}
	n, _ := strconv.Atoi(fields[1])
	return n
}

// starters are the beginnings of the names of processes that start the tasks of a launcher.
var starters = map[string][]string{
	openMPI:           {"mpirun", "mpiexec", "orte", "prte"},
	"mpiexec (MPICH)": {"mpiexec", "mpirun", "hydra", "pmi_proxy"},
	"srun":            {"slurmstepd"},
}

// LeftOver reports whether the launcher's variables in the environment are of another job: a shell
// or a program that a launcher has started passes them on to what it starts. Then there may be no
// rank 0. LeftOver is false if that cannot be found out.
func LeftOver(env slurm.Environment) bool {
	return env.Tasks > 1 && ancestors(os.Getppid(), func(cmd []string) bool {
		name := filepath.Base(strings.TrimPrefix(cmd[0], "-"))
		return !slices.ContainsFunc(starters[env.Launcher], func(s string) bool { return strings.HasPrefix(name, s) })
	})
}

// shellWords quotes the words that a shell would interpret.
func shellWords(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = w
		if w == "" || strings.Trim(w,
			"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-") != "" {
			quoted[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}
