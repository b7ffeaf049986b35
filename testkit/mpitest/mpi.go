//go:build mpi

package mpitest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
)

var world comm.Comm

// Main runs the tests of a package and returns the exit code.
func Main(m *testing.M) int {
	if os.Getenv("OMPI_COMM_WORLD_SIZE") == "" && os.Getenv("PMI_SIZE") == "" &&
		os.Getenv("SLURM_STEP_NUM_TASKS") == "" {
		args, err := arguments()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		for _, n := range []int{2, 3, 4} {
			if code := launch(n, args); code != 0 {
				return code
			}
		}
		return 0
	}
	c, err := comm.World()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return int(status.Of(err))
	}
	world = c
	code := m.Run()
	if code != 0 {
		c.Abort(status.Code(code), "a test failed") // peers may be waiting for this rank
	}
	comm.Finalize()
	return code
}

// arguments returns the arguments of each rank: the same as this process has, and a -run for the
// tests that run on several ranks unless the user has given one.
func arguments() ([]string, error) {
	var args []string
	chosen := false
	for _, a := range os.Args[1:] {
		chosen = chosen || strings.HasPrefix(a, "-test.run=")
		// Without flags for files of the go command: every rank would write them.
		if !strings.HasPrefix(a, "-test.testlogfile") && !strings.HasPrefix(a, "-test.coverprofile") {
			args = append(args, a)
		}
	}
	if chosen {
		return args, nil
	}
	tests, err := testsOfRanks(".")
	if err == nil && len(tests) == 0 {
		err = errors.New("mpitest: no test here calls Sizes; start the tests in the folder of their sources")
	}
	return append(args, "-test.run=^("+strings.Join(tests, "|")+")$"), err
}

// launch starts this test binary on n ranks.
func launch(n int, args []string) int {
	args = append([]string{"--oversubscribe", "--bind-to", "none", "--timeout", "300", "-n", strconv.Itoa(n),
		os.Args[0]}, args...)
	cmd := exec.Command("mpirun", args...)
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_btl_tcp_if_include=lo")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	fmt.Printf("mpirun -n %d\n", n)
	if err := cmd.Run(); err != nil {
		fmt.Fprintf(os.Stderr, "mpirun -n %d: %v\n", n, err)
		return 1
	}
	return 0
}

// Sizes returns the numbers of ranks on which tests run.
func Sizes() []int { return []int{world.Size()} }

func run(n int, f func(c comm.Comm) error) error {
	if n != world.Size() {
		return fmt.Errorf("this job has %d ranks, not %d; call Ranks with the numbers of Sizes", world.Size(), n)
	}
	return f(world)
}
