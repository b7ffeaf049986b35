package launch

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

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
func launcherCommand(pid int) []string {
	for range 3 {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || len(text) == 0 {
			return nil
		}
		words := strings.Split(string(bytes.TrimSuffix(text, []byte{0})), "\x00")
		name := filepath.Base(words[0])
		for _, l := range []string{"mpirun", "mpiexec", "orterun", "prterun"} {
			if name == l || strings.HasPrefix(name, l+".") {
				// mpirun of Open MPI 5 replaces itself by prterun, which has other options.
				if tool := os.Getenv("OMPI_TOOL_NAME"); name == "prterun" && tool != "" {
					words[0] = filepath.Join(filepath.Dir(words[0]), tool)
				}
				return words
			}
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return nil
		}
		// The format is "pid (name) state ppid"; the name may have any characters.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 2 {
			return nil
		}
		if pid, err = strconv.Atoi(fields[1]); err != nil || pid <= 1 {
			return nil
		}
	}
	return nil
}

// shellWords quotes the words that a shell would interpret.
func shellWords(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = w
		if w == "" || strings.Trim(w, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-") != "" {
			quoted[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}
