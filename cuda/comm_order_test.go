package cuda

import (
	"fmt"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// gpuRank is a rank with a device, its communicator, streams, and tensors.
type gpuRank struct {
	host comm.Comm
	d    *Device
	c    *Comm
	s    [2]device.Stream
	mem  []device.Buffer
}

// onGPUs runs f on n goroutine ranks that share the GPU.
func onGPUs(t *testing.T, n int, make func(*Device, comm.Comm) (*Comm, error), f func(r *gpuRank) error) {
	t.Helper()
	cudatest.Use(t)
	err := comm.RunLocal(n, func(host comm.Comm) (err error) {
		r := &gpuRank{host: host}
		if r.d, err = Open(Options{}); err != nil {
			return err
		}
		defer r.d.Close()
		if r.c, err = make(r.d, host); err != nil {
			return err
		}
		for i := range r.s {
			if r.s[i], err = r.d.NewStream(); err != nil {
				return err
			}
		}
		if err := f(r); err != nil {
			return err
		}
		err = r.c.Close()
		for _, s := range r.s {
			s.Close()
		}
		for _, b := range r.mem {
			b.Free()
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func ofKind(kind string) func(*Device, comm.Comm) (*Comm, error) {
	return func(d *Device, host comm.Comm) (*Comm, error) { return NewComm(d, host, kind) }
}

// ofUse is ofKind for a communication stream of another use.
func ofUse(kind string, use streamUse) func(*Device, comm.Comm) (*Comm, error) {
	return func(d *Device, host comm.Comm) (*Comm, error) {
		return newComm(host, func(h comm.Comm, use streamUse) (transport, error) { return transports[kind](d, h, use) },
			use)
	}
}

// tensor allocates a device tensor.
func (r *gpuRank) tensor(d tensor.DType, shape ...int64) (tensor.Tensor, error) {
	t := tensor.Of(nil, d, shape...)
	b, err := r.d.Alloc(t.Bytes())
	if err != nil {
		return t, err
	}
	r.mem = append(r.mem, b)
	t.Data, t.Where = b.Pointer(), tensor.CUDA
	return t, nil
}

// values copies a tensor to the host, behind the work of the stream.
func (r *gpuRank) values(s device.Stream, t tensor.Tensor) ([]float32, error) {
	x := make([]float32, t.Numel())
	if err := r.d.Copy(s, tensor.OfFloat32(x, t.Dims()...), t); err != nil {
		return nil, err
	}
	return x, s.Sync()
}

// TestCommOrder checks that each operation runs after the earlier work of its stream and before the
// later work, on every rank, while other streams are busy. The emulated device runs operations that
// no event orders in any order. Directly after an operation the test overwrites its source, as the
// step loop does, and reads its result, without waiting on the host. If a communicator omits one
// event, this test fails.
func TestCommOrder(t *testing.T) {
	for _, kind := range []string{"ipc", "staged"} {
		for _, rows := range []int64{512, 20_000} { // a small and a large reduction
			for _, n := range []int{2, 3} {
				t.Run(fmt.Sprintf("%s/%d/%d", kind, rows, n), func(t *testing.T) {
					onGPUs(t, n, ofKind(kind), func(r *gpuRank) error { return orderRounds(r, n, 25, rows) })
				})
			}
		}
		t.Run(kind+"/priority", func(t *testing.T) {
			onGPUs(t, 3, ofUse(kind, forPriority), func(r *gpuRank) error { return orderRounds(r, 3, 25, 512) })
		})
	}
}

// TestUnfinishedAllToAll: after an all-to-all whose Wait is never called, closing the communicator
// and the device closes the GPU.
func TestUnfinishedAllToAll(t *testing.T) {
	for _, kind := range []string{"ipc", "staged"} {
		var devices [2]*Device
		onGPUs(t, 2, ofKind(kind), func(r *gpuRank) error {
			devices[r.c.Rank()] = r.d
			dst, err := r.tensor(tensor.F32, 4)
			if err != nil {
				return err
			}
			src, err := r.tensor(tensor.F32, 4)
			if err != nil {
				return err
			}
			_, err = r.c.AllToAllStart(r.s[0], dst, src, []int64{2, 2}, []int64{2, 2})
			return err
		})
		for j, d := range devices {
			if d.d != nil {
				t.Errorf("%s: %d objects still keep the GPU of rank %d open", kind, d.live, j)
			}
		}
	}
}

// TestOneRankFails: if one rank cannot make its communicator, the errors of all ranks name this
// rank, and every GPU can be closed.
func TestOneRankFails(t *testing.T) {
	cudatest.Use(t)
	kinds := map[string]func(*Device, comm.Comm) (*Comm, error){"ipc": ofKind("ipc"), "staged": ofKind("staged"),
		"nccl": func(d *Device, host comm.Comm) (*Comm, error) {
			return newComm(host, func(h comm.Comm, use streamUse) (transport, error) { return newFakeNCCL(d, h, use) },
				forComm)
		}}
	for kind, make := range kinds {
		err := comm.RunLocal(3, func(host comm.Comm) error {
			d, err := Open(Options{})
			if err != nil {
				return err
			}
			if host.Rank() == 1 {
				d.Close()
			}
			const want = "rank 1: cuda.NewStream: the device is closed"
			if _, err := make(d, host); err == nil || err.Error() != want {
				t.Errorf("%s, rank %d: %v, want %s", kind, host.Rank(), err, want)
			}
			if d.Close(); d.d != nil {
				t.Errorf("%s, rank %d: %d objects keep the GPU open", kind, host.Rank(), d.live)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestReserveFails: pinned memory that a failed Reserve has found stays available.
func TestReserveFails(t *testing.T) {
	needEmulated(t)
	onGPUs(t, 1, ofKind("staged"), func(r *gpuRank) error {
		if err := r.c.Reserve(1, 4096); err != nil {
			return err
		}
		t.Setenv("ULYSSES_EMULATED_PINNED", "1024")
		if err := r.c.Reserve(2, 4096); status.Of(err) != status.OutOfMemory {
			return status.Errorf(status.Internal, "two buffers of 4096 bytes: %v", err)
		}
		if p := r.c.transport.(*staged).pool; len(p) != 1 || p[0].used {
			return status.Errorf(status.Internal, "the buffer of the first Reserve is not available")
		}
		return nil
	})
}

func orderRounds(r *gpuRank, n, rounds int, rows int64) error {
	var tensors [6]tensor.Tensor
	for i := range tensors {
		var err error
		if tensors[i], err = r.tensor(tensor.F32, int64(n)*rows); err != nil {
			return err
		}
	}
	src, dst, sum, seen, reduced, other := tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5]
	counts := make([]int64, n)
	for j := range counts {
		counts[j] = rows
	}
	for round := range rounds {
		s, otherStream := r.s[round%2], r.s[1-round%2]
		value := float64(100*round + 10*r.c.Rank() + 1)
		var request comm.Request
		var err error
		fill := func(s device.Stream, t tensor.Tensor, v float64) {
			if err == nil {
				err = r.d.Fill(s, t, v)
			}
		}
		do := func(f func() error) {
			if err == nil {
				err = f()
			}
		}
		finishAllToAll := func() {
			do(func() error { return request.Wait() })
			fill(s, src, -2) // all ranks have read it
			do(func() error { return r.d.Copy(s, seen, dst) })
			fill(s, dst, -3)
		}
		fill(s, src, -5) // the values to send are written late
		do(func() error { return r.d.Scale(s, src, 0.5) })
		fill(s, src, value)
		fill(s, sum, value)
		fill(s, dst, -1)
		do(func() (err error) { request, err = r.c.AllToAllStart(s, dst, src, counts, counts); return err })
		fill(otherStream, other, value)
		if round%4 < 2 { // no other call between start and wait
			finishAllToAll()
		}
		do(func() error { return r.c.AllReduce(s, sum, comm.Sum) })
		if round%4 >= 2 {
			finishAllToAll()
		}
		do(func() error { return r.d.Copy(s, reduced, sum) })
		fill(s, sum, -4)
		if err != nil {
			return err
		}
		got, err := r.values(s, seen)
		if err != nil {
			return err
		}
		for i, x := range got {
			if want := float32(100*round + 10*(i/int(rows)) + 1); x != want {
				return status.Errorf(status.Internal, "round %d: element %d of the all-to-all is %v, want %v", round,
					i, x, want)
			}
		}
		got, err = r.values(s, reduced)
		if err != nil {
			return err
		}
		for i, x := range got {
			if want := float32(n*(100*round+1) + 10*n*(n-1)/2); x != want {
				return status.Errorf(status.Internal, "round %d: element %d of the sum is %v, want %v", round,
					i, x, want)
			}
		}
	}
	return nil
}
