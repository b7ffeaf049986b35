//go:build mpi

package mpitest

import (
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
	if os.Getenv("OMPI_COMM_WORLD_SIZE") == "" && os.Getenv("PMI_SIZE") == "" && os.Getenv("SLURM_STEP_NUM_TASKS") == "" {
		for _, n := range []int{2, 3, 4} {
			if code := launch(n); code != 0 {
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

// launch starts this test binary on n ranks.
func launch(n int) int {
	args := []string{"--oversubscribe", "--bind-to", "none", "--timeout", "300", "-n", strconv.Itoa(n), os.Args[0]}
	for _, a := range os.Args[1:] {
		// Without flags for files of the go command: every rank would write them.
		if !strings.HasPrefix(a, "-test.testlogfile") && !strings.HasPrefix(a, "-test.coverprofile") {
			args = append(args, a)
		}
	}
	cmd := exec.Command("mpirun", args...)
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_btl_tcp_if_include=lo")
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
