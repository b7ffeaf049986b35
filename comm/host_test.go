package comm

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// hostOf returns the two collectives of a host program, here of goroutine ranks. They check all
// lengths.
func hostOf(c Comm) (Allgather, Alltoallv) {
	rows := make([]int64, c.Size())
	allgather := func(in, out []byte) error {
		if len(out) != len(in)*c.Size() {
			return wrong("allgather of %d bytes into %d on %d ranks", len(in), len(out), c.Size())
		}
		for j := range rows {
			rows[j] = int64(len(in))
		}
		return c.AllGather(nil, bytesOf(out), bytesOf(in), rows)
	}
	alltoallv := func(in []byte, inBytes []int64, out []byte, outBytes []int64) error {
		if total(inBytes) != int64(len(in)) || total(outBytes) != int64(len(out)) {
			return wrong("alltoallv of %d bytes %v into %d bytes %v", len(in), inBytes, len(out), outBytes)
		}
		return c.AllToAll(nil, bytesOf(out), bytesOf(in), outBytes, inBytes)
	}
	return allgather, alltoallv
}

func runHost(t *testing.T, n int, gatherOnly bool, run func(Comm) error) error {
	t.Helper()
	return within(t, func() error {
		return RunLocal(n, func(c Comm) error {
			allgather, alltoallv := hostOf(c)
			if gatherOnly {
				alltoallv = nil
			}
			h, err := NewHost(c.Rank(), n, allgather, alltoallv)
			if err != nil {
				return err
			}
			return errors.Join(run(h), h.Close())
		})
	})
}

// hostSupports reports whether a communicator of NewHost supports a case of the suite on n ranks:
// Concurrent uses duplicates at once; Split and Mesh make groups of some ranks from 4 ranks on.
func hostSupports(name string, n int, gatherOnly bool) bool {
	switch {
	case name == "Concurrent", n > 3 && (name == "Split" || name == "Mesh"):
		return false
	case gatherOnly && n > 1:
		return slices.Contains([]string{"Barrier", "AllReduce", "AllReduceNaN", "AllGather", "Broadcast", "Refusals",
			"Agree", "Same", "Mesh"}, name)
	}
	return true
}

func TestHost(t *testing.T) {
	defer func(a, b int64) { hostGatherLimit, reduceScratch = a, b }(hostGatherLimit, reduceScratch)
	for _, limits := range []struct {
		name       string
		call, room int64
	}{{"whole", hostGatherLimit, reduceScratch}, {"rounds", 3000, 20000}} {
		hostGatherLimit, reduceScratch = limits.call, limits.room
		for _, n := range []int{1, 2, 3, 5} {
			for _, gatherOnly := range []bool{false, true} {
				for _, s := range suite {
					if !hostSupports(s.Name, n, gatherOnly) {
						continue
					}
					t.Run(fmt.Sprintf("%s/%d/%s/allgather alone %v", s.Name, n, limits.name, gatherOnly),
						func(t *testing.T) {
							if err := runHost(t, n, gatherOnly, s.Run); err != nil {
								t.Error(err)
							}
						})
				}
			}
		}
	}
}

// TestHostSplit checks that groups which the host's collectives do not support are refused on all
// ranks, and that the communicator still works afterwards.
func TestHostSplit(t *testing.T) {
	refused := func(h Comm, color, key int) error {
		sub, err := h.Split(color, key)
		if status.Of(err) != status.Unsupported || sub != nil || !strings.Contains(err.Error(), "FromMPI") &&
			!strings.Contains(err.Error(), "the keys order") {
			return wrong("rank %d, color %d, key %d: %v, %v", h.Rank(), color, key, sub, err)
		}
		return nil
	}
	err := runHost(t, 4, false, func(h Comm) error {
		r := h.Rank()
		if err := errors.Join(refused(h, r/2, 0), refused(h, min(r, 1)-1, 0), refused(h, 0, -r)); err != nil {
			return err
		}
		if _, err := NewMesh(h, 2, 1, nil, nil, nil); status.Of(err) != status.Unsupported {
			return wrong("a mesh of two halves: %v", err)
		}
		same, err := h.Split(7, r*r)
		if err != nil {
			return err
		}
		alone, err := h.Split(3-r, 0)
		if err != nil {
			return err
		}
		if alone.Size() != 1 || same.Size() != 4 || same.Rank() != r || same.Kind() != "host" {
			return wrong("rank %d of %d, alone %d", same.Rank(), same.Size(), alone.Size())
		}
		if none, err := h.Split(-1, 0); none != nil || err != nil {
			return wrong("a negative color: %v, %v", none, err)
		}
		if err := suiteAllToAll(same); err != nil {
			return err
		}
		if err := same.Close(); err != nil {
			return err
		}
		if err := same.Barrier(); status.Of(err) != status.InvalidArgument {
			return wrong("a closed duplicate: %v", err)
		}
		return h.Barrier()
	})
	if err != nil {
		t.Error(err)
	}
}

func TestHostRefuses(t *testing.T) {
	gather := func(in, out []byte) error { return nil }
	for name, make := range map[string]func() (Comm, error){
		"rank":      func() (Comm, error) { return NewHost(2, 2, gather, nil) },
		"negative":  func() (Comm, error) { return NewHost(-1, 2, gather, nil) },
		"no ranks":  func() (Comm, error) { return NewHost(0, 0, gather, nil) },
		"allgather": func() (Comm, error) { return NewHost(0, 1, nil, nil) },
	} {
		if c, err := make(); c != nil || status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
	err := runHost(t, 2, true, func(h Comm) error {
		x, y, rows := newTensor(tensor.F32, 4), newTensor(tensor.F32, 4), []int64{2, 2}
		for _, err := range []error{h.AllToAll(nil, x, y, rows, rows), h.ReduceScatter(nil, x, y, rows),
			h.SendRecv(nil, x, 1-h.Rank(), y, 1-h.Rank())} {
			if status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), "gave no alltoallv") {
				return wrong("without alltoallv: %v", err)
			}
		}
		return h.Barrier()
	})
	if err != nil {
		t.Error(err)
	}
	err = runHost(t, 2, false, func(h Comm) error {
		x, y, r := newTensor(tensor.F32, 4), newTensor(tensor.F32, 4), h.Rank()
		self := []int64{1, 1}
		more := []int64{1, 1}
		more[r] = 2
		for _, err := range []error{h.AllToAll(nil, x, y, self, more), h.SendRecv(nil, x, -1, y, r)} {
			if status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), "to itself but expects") {
				return wrong("a rank's block for itself: %v", err)
			}
		}
		return h.Barrier()
	})
	if err != nil {
		t.Error(err)
	}
}

// TestHostFails checks that after a failure of the host's collective, or an abort, this call and
// all later calls return errors with the cause.
func TestHostFails(t *testing.T) {
	cause := errors.New("connection reset")
	fails := func(in []byte, inBytes []int64, out []byte, outBytes []int64) error { return cause }
	for what, end := range map[string]func(h Comm) error{
		"the host program's allgather failed: connection reset": Comm.Barrier,
		"the host program's alltoallv failed: connection reset": func(h Comm) error {
			x, y := newTensor(tensor.F32, 4), newTensor(tensor.F32, 4)
			return h.AllToAll(nil, x, y, []int64{2, 2}, []int64{2, 2})
		},
		"rank 1 ended the job (numeric): loss is NaN": func(h Comm) error {
			h.Abort(status.Numeric, "loss is NaN")
			return h.Barrier()
		},
	} {
		calls := 0
		h, err := NewHost(1, 2, func(in, out []byte) error { calls++; return cause }, fails)
		if err != nil {
			t.Fatal(err)
		}
		if err := end(h); status.Of(err) != status.Comm || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %q", err, what)
		} else if !strings.Contains(what, "NaN") && !errors.Is(err, cause) {
			t.Errorf("%v lost its cause", err)
		}
		before := calls
		if err := h.Barrier(); status.Of(err) != status.Comm || !strings.Contains(err.Error(), what) ||
			calls != before {
			t.Errorf("afterwards: %v, %d calls", err, calls-before)
		}
	}
}

// TestHostSteadyState checks that nothing is allocated after the first calls.
func TestHostSteadyState(t *testing.T) {
	const warm, rounds = 20, 200
	var before, after runtime.MemStats
	err := runHost(t, 2, false, func(h Comm) error {
		rows, uneven, r := []int64{3, 3}, []int64{4, 2}, int64(h.Rank())
		src, dst, big, small := newTensor(tensor.F32, 6, 4), newTensor(tensor.F32, 6, 4), newTensor(tensor.F32, 40001),
			newTensor(tensor.F32, 5)
		for i := range warm + rounds {
			if i == warm && r == 0 {
				runtime.ReadMemStats(&before)
			}
			q, err := h.AllToAllStart(nil, dst, src, rows, rows)
			if err != nil {
				return err
			}
			if err := errors.Join(h.AllReduce(nil, big, Sum), h.AllReduce(nil, small, Max), q.Wait(),
				h.AllGather(nil, dst, dst.Slice(0, r*3, r*3+3), rows), h.AllGather(nil, dst, src, uneven),
				h.ReduceScatter(nil, dst, src, rows), h.Broadcast(nil, src, 1),
				h.SendRecv(nil, dst, 1-int(r), src, 1-int(r)), h.Barrier()); err != nil {
				return err
			}
		}
		if r == 0 {
			runtime.ReadMemStats(&after)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := after.Mallocs - before.Mallocs; n > rounds/2 {
		t.Errorf("%d allocations in %d rounds", n, rounds)
	}
}
