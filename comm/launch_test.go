package comm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"ulysses/internal/status"
	"ulysses/testkit/need"
)

const scenarioVariable = "ULYSSES_MPI_TEST"

// TestMain ends MPI in the processes that startRanks started.
func TestMain(m *testing.M) {
	code := m.Run()
	if currentScenario() != "" {
		if code != 0 && mpiStart.loaded {
			// other ranks may be waiting for this one
			(&mpiComm{}).Abort(status.Code(code), "a test failed")
		}
		Finalize()
	}
	os.Exit(code)
}

// Tests of MPI start their own binary under mpirun. In these processes, the same test runs a
// scenario as one of the ranks.

// currentScenario returns the scenario in a process that startRanks started, else "".
func currentScenario() string { return os.Getenv(scenarioVariable) }

// startRanks runs the calling top-level test as n ranks under mpirun and returns their output. An
// error of type exec.ExitError has the exit code of mpirun.
func startRanks(t *testing.T, scenario string, n int) (output string, err error) {
	t.Helper()
	name, _, _ := strings.Cut(t.Name(), "/")
	t.Setenv(scenarioVariable, scenario)
	defer os.Unsetenv(scenarioVariable)
	return startProgram(t, n, os.Args[0], "-test.run=^"+name+"$", "-test.count=1")
}

// startProgram runs a program as n ranks under mpirun. Suites of ranks that share a GPU take
// minutes; a case that hangs ends after the seconds of mpiRun.
func startProgram(t *testing.T, n int, program ...string) (output string, err error) {
	t.Helper()
	mpirun := need.Tool(t, "mpirun", "install openmpi-bin")
	ctx, cancel := context.WithTimeout(context.Background(), 250*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, mpirun,
		append([]string{"--oversubscribe", "--bind-to", "none", "--timeout", "240", "-n", fmt.Sprint(n)},
			program...)...)
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_btl_tcp_if_include=lo", "OMPI_MCA_orte_base_help_aggregate=0")
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// AbortHanging ends all ranks after a time, unless the timer is stopped.
func AbortHanging(c Comm, what string, after time.Duration) *time.Timer {
	return time.AfterFunc(after, func() {
		fmt.Printf("rank %d: %s hangs\n", c.Rank(), what)
		c.Abort(status.Comm, "hangs")
	})
}

// mpiRun runs f on all ranks. An error is printed at once, because other ranks may be waiting for
// this one; then the timer ends the job.
func mpiRun(t *testing.T, w Comm, name string, f func(Comm) error) {
	defer AbortHanging(w, name, 100*time.Second).Stop()
	err := f(w)
	if err != nil {
		fmt.Printf("rank %d: %s: %v\n", w.Rank(), name, err)
	}
	if err := Agree(w, err); err != nil {
		t.Errorf("%s: %v", name, err)
	}
}
