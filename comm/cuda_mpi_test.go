//go:build mpi

package comm_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// TestCUDAMPI runs the suite on processes that share a GPU or have one each.
func TestCUDAMPI(t *testing.T) {
	if comm.Inside() == "" {
		onGPU := os.Getenv("ULYSSES_CUDA_PLUGIN") != ""
		cudatest.Use(t)
		t.Setenv("ULYSSES_EMULATED_SHARED", "1") // memory that other processes can map
		for _, n := range []int{2, 3, 4} {
			if out, err := comm.StartRanks(t, "cuda", n); err != nil {
				t.Errorf("%d ranks: %v\n%s", n, err, out)
			}
		}
		// every MPI library accepts the memory of an emulated GPU
		if !onGPU {
			t.Setenv("ULYSSES_MPI_CUDA", "1")
			if out, err := comm.StartRanks(t, "cuda", 3); err != nil {
				t.Errorf("MPI with GPU memory: %v\n%s", err, out)
			}
		}
		return
	}
	world, err := comm.World()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range transports {
		for _, s := range comm.Suite {
			if !runs(t, w.kind, s.Name, world.Size()) {
				continue
			}
			host, err := world.Split(0, world.Rank()) // closed with the device's communicator
			if err != nil {
				t.Fatal(err)
			}
			name := w.name + ", " + s.Name
			watch := comm.AbortHanging(world, name, 100*time.Second)
			err = suiteOnGPU(host, w.kind, w.chunk, s.Run)
			if err != nil {
				// print at once: other ranks may be waiting
				fmt.Printf("rank %d: %s: %v\n", world.Rank(), name, err)
			}
			if err := comm.Agree(world, err); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			watch.Stop()
		}
	}
}

// onEmulatedRanks runs f on n processes that share an emulated GPU with this setting, by ipc.
func onEmulatedRanks(t *testing.T, n int, setting, value string, f func(d *cuda.Device, c *cuda.Comm) error) {
	if comm.Inside() == "" {
		if os.Getenv("ULYSSES_CUDA_PLUGIN") != "" {
			t.Skip("SKIPPED: the setting is of the emulated GPU")
		}
		cudatest.Use(t)
		t.Setenv(setting, value)
		t.Setenv("ULYSSES_EMULATED_TIMEOUT", "5")
		if out, err := comm.StartRanks(t, "cuda", n); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	world, host := hostRanks(t)
	if err := onGPU(host, "ipc", f); err != nil {
		fmt.Printf("rank %d: %v\n", world.Rank(), err) // at once: other ranks may be waiting
		t.Fail()
		world.Abort(status.Of(err), "a rank has failed")
	}
}

// hostRanks returns the ranks, and a communicator of them that a device's communicator closes.
func hostRanks(t *testing.T) (world, host comm.Comm) {
	world, err := comm.World()
	if err != nil {
		t.Fatal(err)
	}
	if host, err = world.Split(0, world.Rank()); err != nil {
		t.Fatal(err)
	}
	return world, host
}

// TestCUDALateEvents checks that hosts may enqueue calls ahead of their GPUs if a wait for an event
// of another process ends only with the newest record of the event. If a rank recorded an event
// again while another rank may wait for it, the GPUs would wait for each other forever. Messages
// between some of the ranks make their numbers of calls differ.
func TestCUDALateEvents(t *testing.T) {
	onEmulatedRanks(t, 3, "ULYSSES_EMULATED_LATE", "300", func(d *cuda.Device, c *cuda.Comm) error {
		const rounds, large = 24, 20_000
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		defer s.Close()
		sums, _, err := gpuRows(d, rounds, large) // not freed: other ranks map it until Close
		if err != nil {
			return err
		}
		messages, _, err := gpuRows(d, 2*rounds, 10)
		if err != nil {
			return err
		}
		for i := range int64(rounds) {
			x := sums.Slice(0, i, i+1).View(large)
			if i%2 == 0 {
				x = x.Slice(0, 0, 100)
			}
			sent, received := messages.Slice(0, 2*i, 2*i+1), messages.Slice(0, 2*i+1, 2*i+2)
			if err := d.Fill(s, x, float64(int64(c.Rank())+i)); err != nil {
				return err
			}
			if err := c.AllReduce(s, x, comm.Sum); err != nil {
				return err
			}
			if err := d.Fill(s, sent, float64(i)); err != nil {
				return err
			}
			// of four messages, three go from rank 0 to rank 1, and one from rank 1 to rank 2
			switch from := int(i % 4); c.Rank() {
			case 0:
				if from != 3 {
					err = c.SendRecv(s, tensor.Tensor{}, -1, sent, 1)
				}
			case 1:
				if from != 3 {
					err = c.SendRecv(s, received, 0, tensor.Tensor{}, -1)
				} else {
					err = c.SendRecv(s, tensor.Tensor{}, -1, sent, 2)
				}
			case 2:
				if from == 3 {
					err = c.SendRecv(s, received, 1, tensor.Tensor{}, -1)
				}
			}
			if err != nil {
				return err
			}
		}
		gotSums, err := gpuValues(d, s, sums)
		if err != nil {
			return err
		}
		gotMessages, err := gpuValues(d, s, messages)
		if err != nil {
			return err
		}
		for i := range rounds {
			if got, want := gotSums[i*large], float32(3*i+3); got != want {
				return comm.Wrong("sum %d is %v, want %v", i, got, want)
			}
			receives := c.Rank() == 1 && i%4 != 3 || c.Rank() == 2 && i%4 == 3
			if got := gotMessages[(2*i+1)*10]; receives && got != float32(i) {
				return comm.Wrong("message %d is %v", i, got)
			}
		}
		return nil
	})
}

// TestCUDAReusedHandle checks that a rank reads a tensor whose memory has the handle of memory that
// was freed before.
func TestCUDAReusedHandle(t *testing.T) {
	onEmulatedRanks(t, 3, "ULYSSES_EMULATED_REUSE", "1", func(d *cuda.Device, c *cuda.Comm) error {
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		defer s.Close()
		sub, err := c.Split(0, c.Rank()) // maps the same memory
		if err != nil {
			return err
		}
		for i := range 6 {
			x, free, err := gpuRows(d, 1, 100_000)
			if err != nil {
				return err
			}
			by, root := comm.Comm(c), i%3
			if i%2 == 1 {
				by = sub
			}
			if err := d.Fill(s, x, float64(10*i+c.Rank())); err != nil {
				return err
			}
			if err := by.Broadcast(s, x, root); err != nil {
				return err
			}
			got, err := gpuValues(d, s, x)
			if err != nil {
				return err
			}
			if want := float32(10*i + root); got[0] != want || got[99_999] != want {
				return comm.Wrong("round %d: %v and %v, want %v", i, got[0], got[99_999], want)
			}
			if err := c.Barrier(); err != nil {
				return err
			}
			free()
		}
		return sub.Close()
	})
}

// TestCUDAMessageFails checks that both ranks of a message return if the sender cannot export its
// tensor, and that later messages arrive.
func TestCUDAMessageFails(t *testing.T) {
	onEmulatedRanks(t, 2, "ULYSSES_EMULATED_SHARED", "1", func(d *cuda.Device, c *cuda.Comm) error {
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		defer s.Close()
		x, _, err := gpuRows(d, 1, 5)
		if err != nil {
			return err
		}
		defer comm.AbortHanging(c, "a message", 20*time.Second).Stop()
		wrong := tensor.OfFloat32(make([]float32, 5), 1, 5)
		wrong.Where = tensor.CUDA
		for round := range 3 {
			if err := d.Fill(s, x, float64(c.Rank())); err != nil {
				return err
			}
			send, want := x, ""
			if round == 1 && c.Rank() == 0 {
				send, want = wrong, "is not in memory of this device"
			}
			if c.Rank() == 0 {
				err = c.SendRecv(s, tensor.Tensor{}, -1, send, 1)
			} else {
				if round == 1 {
					want = "rank 0 could not export its tensor; see its error"
				}
				err = c.SendRecv(s, x, 0, tensor.Tensor{}, -1)
			}
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				return comm.Wrong("round %d: %v, want %q", round, err, want)
			}
			v, err := gpuValues(d, s, x)
			if err != nil {
				return err
			}
			if want := float32(c.Rank()); round == 1 && v[0] != want || round != 1 && v[0] != 0 {
				return comm.Wrong("round %d: %v", round, v)
			}
		}
		return nil
	})
}

// TestCUDAPinnedMemory checks that all ranks return if one has no pinned memory for the test of
// events, with the same error.
func TestCUDAPinnedMemory(t *testing.T) {
	if comm.Inside() == "" {
		onEmulatedRanks(t, 3, "ULYSSES_EMULATED_SHARED", "1", nil)
		return
	}
	world, host := hostRanks(t)
	defer comm.AbortHanging(world, "the test of events", 20*time.Second).Stop()
	if world.Rank() == 1 {
		t.Setenv("ULYSSES_EMULATED_PINNED", "500000")
	}
	err := onGPU(host, "ipc", func(*cuda.Device, *cuda.Comm) error { return nil })
	if status.Of(err) != status.OutOfMemory || !strings.HasPrefix(err.Error(), "rank 1: pinned memory: ") {
		t.Errorf("rank %d: %v", world.Rank(), err)
	}
}

// gpuRows allocates a tensor of rows of F32.
func gpuRows(d *cuda.Device, rows, width int64) (x tensor.Tensor, free func(), err error) {
	x = tensor.Of(nil, tensor.F32, rows, width)
	b, err := d.Alloc(x.Bytes())
	if err != nil {
		return x, nil, err
	}
	x.Data, x.Where = b.Pointer(), tensor.CUDA
	return x, b.Free, nil
}

// gpuValues copies a tensor to the host, behind the work of the stream.
func gpuValues(d *cuda.Device, s device.Stream, x tensor.Tensor) ([]float32, error) {
	v := make([]float32, x.Numel())
	if err := d.Copy(s, tensor.OfFloat32(v, x.Dims()...), x); err != nil {
		return nil, err
	}
	return v, s.Sync()
}
