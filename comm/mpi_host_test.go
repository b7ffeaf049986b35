package comm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/testkit/need"
)

// TestFromMPI acts as a host program that has started MPI, at every thread level, and as one that
// has not. Without the tag mpi, it builds the shim that FromMPI opens.
func TestFromMPI(t *testing.T) {
	scenarios := map[string]func(t *testing.T){
		"started by us": func(t *testing.T) { hostOfMPI(t, -1) },
		"single":        func(t *testing.T) { hostOfMPI(t, threadSingle) },
		"funneled":      func(t *testing.T) { hostOfMPI(t, threadFunneled) },
		"serialized":    func(t *testing.T) { hostOfMPI(t, threadSerialized) },
		"multiple":      func(t *testing.T) { hostOfMPI(t, threadMultiple) },
		"abort": func(t *testing.T) {
			w := fromMPI(t, -1)
			if w.Rank() == 1 {
				w.Abort(status.Numeric, "loss is NaN")
			}
			t.Error(w.Barrier()) // waits until it is ended
		},
	}
	if scenario := currentScenario(); scenario != "" {
		runtime.LockOSThread() // a host program calls from the thread that started MPI
		scenarios[scenario](t)
		return
	}
	needTable(t)
	for name := range scenarios {
		for _, n := range []int{2, 3} {
			out, err := startRanks(t, name, n)
			var exit *exec.ExitError
			if name == "abort" && errors.As(err, &exit) && exit.ExitCode() == int(status.Numeric) {
				continue
			}
			if err != nil || name == "abort" {
				t.Errorf("%s, %d ranks: %v\n%s", name, n, err, out)
			}
		}
	}
}

// TestAlone starts ranks with the launcher of another MPI library, which does not connect them.
func TestAlone(t *testing.T) {
	if currentScenario() != "" {
		_, err := FromMPI(-1)
		mustBe(t, "2 tasks", err, status.InvalidArgument,
			"comm.FromMPI: mpiexec (MPICH) started 2 tasks (PMI_SIZE), but Open MPI")
		return
	}
	mpiexec := need.Tool(t, "mpiexec.mpich", "run make deps-test")
	needTable(t)
	t.Setenv(scenarioVariable, "alone")
	cmd := exec.Command(mpiexec, "-n", "2", os.Args[0], "-test.run=^TestAlone$", "-test.count=1")
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestCheckAlone has the variables of launchers, and the sizes of MPI_COMM_WORLD.
func TestCheckAlone(t *testing.T) {
	for _, c := range []struct {
		launcher    string
		tasks, size int
		text        string
	}{
		{"", 0, 1, ""}, {"srun", 1, 1, ""}, {"srun", 4, 4, ""},
		{"mpirun (Open MPI)", 2, 4, ""}, // a variable of an outer job
		{"mpirun (Open MPI)", 4, 1, "mpirun (Open MPI) started 4 tasks (OMPI_COMM_WORLD_SIZE)"},
		{"srun", 4, 1, "use srun --mpi=pmix"},
	} {
		err := checkAlone("op", "MPICH", slurm.Environment{Launcher: c.launcher, Tasks: c.tasks}, c.size)
		if c.text != "" {
			mustBe(t, c.text, err, status.InvalidArgument, c.text)
		} else if err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func fromMPI(t *testing.T, handle int64) *mpiComm {
	t.Helper()
	c, err := FromMPI(handle)
	if err != nil {
		t.Fatal(err)
	}
	return c.(*mpiComm)
}

// mustBe checks the code of an error and that its text contains text.
func mustBe(t *testing.T, what string, err error, code status.Code, text string) {
	t.Helper()
	if status.Of(err) != code || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("%s: %v (%v), want %q (%v)", what, err, status.Of(err), text, code)
	}
}

// hostOfMPI starts MPI with the thread level. If level is negative, FromMPI starts MPI.
func hostOfMPI(t *testing.T, level int) {
	_, err := FromMPI(7)
	mustBe(t, "a handle before MPI_Init", err, status.InvalidArgument, "MPI has not been started")
	_, err = FromMPI(1 << 40)
	mustBe(t, "a handle of 41 bits", err, status.InvalidArgument, "does not fit 32 bits")
	if !mpiStart.loaded {
		t.Fatal("no MPI")
	}
	if level >= 0 {
		if err := startMPI(level); err != nil {
			t.Fatal(err)
		}
		if _, _, have := mpiState(); have != level {
			t.Fatalf("thread level %d, not %d", have, level)
		}
	}
	w := fromMPI(t, -1)
	checkLoadedMPI(t)
	if lib := Library(); strings.Contains(lib, "thread level multiple") != (level < 0 || level == threadMultiple) {
		t.Errorf("library %q at level %d", lib, level)
	}
	_, err = FromMPI(123456)
	mustBe(t, "an unknown handle", err, status.InvalidArgument, "handle 123456: no communicator has this handle")
	for _, s := range suite {
		if s.Name != "Concurrent" || level < 0 || level == threadMultiple {
			mpiRun(t, w, s.Name, s.Run)
		}
	}
	mpiRun(t, w, "bitwise equal", mpiBitwiseEqual)
	subset(t, w)
	if level < 0 || level == threadMultiple {
		mpiRun(t, w, "two at once", fromTwoThreads)
	}
	if level == threadSingle || level == threadFunneled {
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			done <- w.Barrier()
			_, err := FromMPI(-1)
			done <- err
		}()
		mustBe(t, "another thread", <-done, status.InvalidArgument, "call from that thread")
		mustBe(t, "another thread", <-done, status.InvalidArgument, "comm.FromMPI: MPI has a thread level below")
	}
	second, last := fromMPI(t, w.Fortran()), fromMPI(t, -1)
	if err := errors.Join(w.Close(), second.Barrier(), second.Close()); err != nil {
		t.Error(err)
	}
	rows := make([]int64, last.size)
	r, err := last.AllToAllStart(nil, bytesOf(nil), bytesOf(nil), rows, rows)
	if err != nil {
		t.Fatal(err)
	}
	Finalize() // too early
	mustBe(t, "a call after MPI_Finalize", last.Barrier(), status.Comm, "MPI has ended")
	mustBe(t, "a request after MPI_Finalize", r.Wait(), status.Comm, "MPI has ended")
	mustBe(t, "closing after MPI_Finalize", last.Close(), status.Comm, "MPI has ended")
	_, err = FromMPI(-1)
	mustBe(t, "MPI again", err, status.Comm, "MPI has ended")
	last.Abort(status.Internal, "nothing to end")
}

// subset passes FromMPI the handle of a communicator with all ranks except the first, in reverse
// order, and then the handle of a freed communicator.
func subset(t *testing.T, w *mpiComm) {
	mpiRun(t, w, "subset", func(Comm) error {
		sub, err := w.Split(min(w.rank, 1)-1, -w.rank)
		if err != nil || sub == nil {
			return err
		}
		handle := sub.(*mpiComm).Fortran()
		c, err := FromMPI(handle)
		if err != nil {
			return err
		}
		if c.Size() != w.size-1 || c.Rank() != w.size-1-w.rank || c.(*mpiComm).Fortran() == handle {
			return wrong("rank %d of %d, handle %d of %d", c.Rank(), c.Size(), c.(*mpiComm).Fortran(), handle)
		}
		if err := sub.Close(); err != nil { // the duplicate stays valid
			return err
		}
		if _, err := FromMPI(handle); status.Of(err) != status.InvalidArgument {
			return wrong("handle %d of a freed communicator: %v", handle, err)
		}
		return errors.Join(suiteAllToAll(c), suiteAllReduce(c), c.Close())
	})
}

// fromTwoThreads makes communicators on two threads at once, in an order that differs between
// ranks.
func fromTwoThreads(w Comm) error {
	handles, errs := [2]*mpiComm{}, [2]error{}
	for i := range handles {
		sub, err := w.Split(0, 0)
		if err != nil {
			return err
		}
		handles[i] = sub.(*mpiComm)
	}
	var wg sync.WaitGroup
	for i := range handles {
		k := (i + w.Rank()) % 2
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, err := FromMPI(handles[k].Fortran())
			if err == nil {
				err = errors.Join(c.Barrier(), c.Close())
			}
			errs[k] = errors.Join(err, handles[k].Close())
		}()
		// the first call should wait for its peers when the second begins
		time.Sleep(20 * time.Millisecond)
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// mpiBitwiseEqual checks that sums of MPI and of goroutine ranks are bitwise equal.
func mpiBitwiseEqual(w Comm) error {
	for _, d := range reducedTypes {
		for _, n := range []int64{100, 50_000} {
			t := newOperand(d, w.Rank(), n)
			if err := w.AllReduce(nil, t, Sum); err != nil {
				return err
			}
			err := RunLocal(w.Size(), func(c Comm) error {
				u := newOperand(d, c.Rank(), n)
				if err := c.AllReduce(nil, u, Sum); err != nil {
					return err
				}
				if string(u.RawBytes()) != string(t.RawBytes()) {
					return wrong("%v: goroutine ranks and MPI differ", t)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}
