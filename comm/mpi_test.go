//go:build mpi

package comm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/tensor"
	"ulysses/testkit/need"
)

func world(t *testing.T) *mpiComm {
	t.Helper()
	w, err := World()
	if err != nil {
		t.Fatal(err)
	}
	return w.(*mpiComm)
}

func TestMPI(t *testing.T) {
	if currentScenario() == "" {
		for _, n := range []int{2, 3, 4} {
			if out, err := startRanks(t, "suite", n); err != nil {
				t.Errorf("%d ranks: %v\n%s", n, err, out)
			}
		}
		return
	}
	w := world(t)
	if err := slurm.Env().Check(w.Size(), Available()); err != nil {
		t.Fatal(err)
	}
	all := func(how string) {
		for _, s := range suite {
			mpiRun(t, w, how+", "+s.Name, s.Run)
		}
	}
	all("default limits")
	mpiRun(t, w, "two levels", suiteTwoLevel)
	// With small limits, messages are split, messages replace collectives, and sums run in many
	// rounds, as otherwise beyond 2^31 bytes.
	defer func(a, b, c int64) { mpiMaxMessage, mpiMaxOffset, reduceScratch = a, b, c }(mpiMaxMessage, mpiMaxOffset,
		reduceScratch)
	mpiMaxMessage, mpiMaxOffset, reduceScratch = 5000, 3000, 20000
	all("small limits")
	mpiRun(t, w, "bitwise equal", mpiBitwiseEqual)
	mpiRun(t, w, "steady state", mpiSteadyState)
	mpiRun(t, w, "waiting", suiteWaiting)
	mpiRun(t, w, "handles", mpiHandles)
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// TestTwoLevelSlurm runs the all-to-all with two levels on two virtual nodes under Slurm, whose
// messages are TCP, with the nodes that the ranks find themselves.
func TestTwoLevelSlurm(t *testing.T) {
	if currentScenario() != "" {
		w := world(t)
		nodeOf, err := Nodes(w)
		if err != nil || !slices.Equal(nodeOf, []int{0, 0, 1, 1}) {
			t.Errorf("nodes %v, %v", nodeOf, err)
		}
		mpiRun(t, w, "two levels", suiteTwoLevel)
		return
	}
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	need.Tool(t, "slurmctld", "run make deps-test")
	need.Namespaces(t)                      // Slurm's daemons also start as root
	lab, err := os.MkdirTemp("/tmp", "lab") // a short path: the daemons' sockets have 108 bytes for it
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("SLURM_BASE_PORT", "27400") // beside the cluster of cmd/ulysses-mpi
	run := func(program string, args ...string) string {
		out, err := exec.Command(program, args...).CombinedOutput()
		if err != nil {
			t.Errorf("%s %v: %v\n%s", program, args, err, out)
		}
		return string(out)
	}
	t.Cleanup(func() {
		run("../slurm/lab.sh", "down", lab)
		os.RemoveAll(lab)
	})
	run("timeout", "60", "../slurm/lab.sh", "up", lab)
	t.Setenv("SLURM_CONF", lab+"/etc/slurm.conf")
	t.Setenv(scenarioVariable, "two levels")
	run("timeout", "-k", "5", "90", "srun", "-N2", "-n4", "--ntasks-per-node=2", "--mpi=pmix", os.Args[0],
		"-test.run=^TestTwoLevelSlurm$", "-test.count=1")
	os.Unsetenv(scenarioVariable)
}

func mpiHandles(c Comm) error {
	w := c.(*mpiComm)
	sub, err := w.Split(w.Rank()%2, 0)
	if err != nil {
		return err
	}
	if f := sub.(*mpiComm).Fortran(); f < 0 || f == w.Fortran() {
		return wrong("Fortran handles: world %d, half of it %d", w.Fortran(), f)
	}
	if lib := Library(); !strings.Contains(lib, "thread level multiple") {
		return wrong("library %q", lib)
	}
	if err := errors.Join(sub.Close(), sub.Close()); err != nil {
		return err
	}
	if err := sub.Barrier(); status.Of(err) != status.InvalidArgument {
		return wrong("barrier of a closed communicator: %v", err)
	}
	return nil
}

// mpiSteadyState checks that requests and scratch are reused, and that garbage collection during an
// all-to-all does no harm.
func mpiSteadyState(w Comm) error {
	rows := make([]int64, w.Size())
	for j := range rows {
		rows[j] = 9000
	}
	src, dst := newTensor(tensor.F32, total(rows)), newTensor(tensor.F32, total(rows))
	small, big := newTensor(tensor.F32, 10), newTensor(tensor.F32, 100_000)
	var before, after runtime.MemStats
	const warm, rounds = 5, 50
	for i := range warm + rounds {
		if i == warm {
			runtime.ReadMemStats(&before)
		}
		r, err := w.AllToAllStart(nil, dst, src, rows, rows)
		if err != nil {
			return err
		}
		if i < warm {
			runtime.GC()
		}
		if err := errors.Join(w.AllReduce(nil, small, Sum), w.AllReduce(nil, big, Sum), r.Wait()); err != nil {
			return err
		}
	}
	runtime.ReadMemStats(&after)
	if n := after.Mallocs - before.Mallocs; n > 4*rounds {
		return wrong("%d allocations in %d rounds", n, rounds)
	}
	return nil
}

// TestMPIEnds checks that mpirun ends soon after a failure of one rank, with the exit code of the
// failure.
func TestMPIEnds(t *testing.T) {
	scenarios := []struct {
		name string
		code int    // exit code of mpirun
		text string // in the output
	}{
		{"abort", int(status.Numeric), "rank 1: loss is NaN"},
		{"late", int(status.Comm), "all-to-all #1 on axis world"},
		{"killed", 137, "signal 9"},
		{"short", 0, "the message of rank 1 has another length than its receiver expects"},
	}
	if scenario := currentScenario(); scenario != "" {
		mpiScenario(t, scenario)
		return
	}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			began := time.Now()
			out, err := startRanks(t, s.name, 3)
			var exit *exec.ExitError
			code := 0
			if errors.As(err, &exit) {
				code = exit.ExitCode()
			} else if err != nil {
				t.Fatal(err)
			}
			if code != s.code || !strings.Contains(out, s.text) {
				t.Errorf("exit code %d, want %d, and %q in:\n%s", code, s.code, s.text, out)
			}
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}

func mpiScenario(t *testing.T, scenario string) {
	w := world(t)
	watch := NewWatch(time.Second, "here", func(text string) {
		fmt.Println(text)
		w.Abort(status.Comm, text)
	})
	c := NewCounted(w, "world", nil, nil, watch)
	if scenario == "short" {
		time.AfterFunc(100*time.Second, func() { w.Abort(status.Comm, "hangs") })
		rows := int64(5)
		if w.Rank() == 1 {
			rows = 4
		}
		err := w.SendRecv(nil, newTensor(tensor.F32, 5), (w.Rank()+2)%3, newTensor(tensor.F32, rows), (w.Rank()+1)%3)
		if (err != nil) != (w.Rank() == 2) {
			t.Errorf("rank %d: %v", w.Rank(), err)
		}
		if err != nil {
			fmt.Println(err)
		}
		return
	}
	if w.Rank() == 1 {
		switch scenario {
		case "abort":
			fmt.Println("rank 1: loss is NaN")
			w.Abort(status.Numeric, "loss is NaN")
		case "killed":
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		select {} // never arrives
	}
	t.Error(suiteAllToAll(c))
}
