package comm_test

import (
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// TestCUDAEnds checks that all ranks return after an abort during a call, and that no other rank
// uses the memory of a rank that has returned: every rank frees its memory at once.
func TestCUDAEnds(t *testing.T) {
	cudatest.Use(t)
	const n = 3
	rows := []int64{4000, 4000, 4000}
	f32 := func(n int64) tensor.Tensor { return tensor.OfFloat32(make([]float32, n), n) }
	calls := map[string]func(c comm.Comm) error{
		"all-to-all": func(c comm.Comm) error { return c.AllToAll(nil, f32(12000), f32(12000), rows, rows) },
		"reduce":     func(c comm.Comm) error { return c.AllReduce(nil, f32(40000), comm.Sum) },
		"small":      func(c comm.Comm) error { return c.AllReduce(nil, f32(4), comm.Sum) },
		"gather":     func(c comm.Comm) error { return c.AllGather(nil, f32(12000), f32(4000), rows) },
		"scatter":    func(c comm.Comm) error { return c.ReduceScatter(nil, f32(4000), f32(12000), rows) },
		"pair": func(c comm.Comm) error {
			return c.SendRecv(nil, f32(4000), (c.Rank()+1)%n, f32(4000), (c.Rank()+2)%n)
		},
	}
	for _, w := range transports[:3] { // with NCCL, ranks end with the job
		for name, call := range calls {
			t.Run(w.name+"/"+name, func(t *testing.T) {
				for round := range 10 {
					err := comm.Within(t, func() error {
						return comm.RunLocal(n, func(host comm.Comm) (err error) {
							defer func() {
								// another code would mean an access to freed memory
								if status.Of(err) != status.Comm {
									t.Errorf("rank %d: %v", host.Rank(), err)
								}
							}()
							return suiteOnGPU(host, w.kind, w.chunk, func(c comm.Comm) error {
								if err := c.Barrier(); err != nil {
									return err
								}
								if c.Rank() == round%n {
									time.AfterFunc(time.Duration(300+150*round)*time.Microsecond,
										func() { c.Abort(status.Internal, "now") })
								}
								for {
									if err := call(c); err != nil {
										return err
									}
								}
							})
						})
					})
					if status.Of(err) != status.Comm ||
						!strings.Contains(err.Error(), "ended the job (internal): now") {
						t.Fatal(err)
					}
				}
			})
		}
	}
}

// TestCUDAMismatch checks that arguments that do not match between ranks end the job, with an error
// that names ranks.
func TestCUDAMismatch(t *testing.T) {
	cudatest.Use(t)
	f32 := func(n int64) tensor.Tensor { return tensor.OfFloat32(make([]float32, n), n) }
	odd := func(c comm.Comm) int64 { return int64(c.Rank() % 2) }
	for _, w := range transports[:3] { // NCCL does not compare arguments
		for name, run := range map[string]func(comm.Comm) error{
			"order": func(c comm.Comm) error {
				if c.Rank() == 0 {
					return c.Broadcast(nil, f32(1), 0)
				}
				return c.AllReduce(nil, f32(1), comm.Sum)
			},
			"reduce":    func(c comm.Comm) error { return c.AllReduce(nil, f32(5+odd(c)), comm.Sum) },
			"op":        func(c comm.Comm) error { return c.AllReduce(nil, f32(5), comm.Op(odd(c))) },
			"broadcast": func(c comm.Comm) error { return c.Broadcast(nil, f32(5+odd(c)), 0) },
			"root":      func(c comm.Comm) error { return c.Broadcast(nil, f32(5), int(odd(c))) },
			"all-to-all": func(c comm.Comm) error {
				rows := []int64{1, 1, 1 + odd(c)}
				return c.AllToAll(nil, f32(9), f32(9), rows, rows)
			},
			"gather": func(c comm.Comm) error { return c.AllGather(nil, f32(9), f32(3), []int64{1, 1, 1 + odd(c)}) },
			"scatter": func(c comm.Comm) error {
				return c.ReduceScatter(nil, f32(3), f32(9), []int64{1, 1, 1 + odd(c)})
			},
			"pair": func(c comm.Comm) error {
				return c.SendRecv(nil, f32(3), (c.Rank()+1)%3, f32(3+odd(c)), (c.Rank()+2)%3)
			},
		} {
			t.Run(w.name+"/"+name, func(t *testing.T) {
				err := comm.Within(t, func() error {
					return comm.RunLocal(3, func(host comm.Comm) error {
						return suiteOnGPU(host, w.kind, w.chunk, run)
					})
				})
				if status.Of(err) != status.Comm || !strings.Contains(err.Error(), "rank") {
					t.Errorf("%v (%v)", err, status.Of(err))
				}
			})
		}
	}
}

// TestCUDASteadyState checks that nothing is allocated after the first calls.
func TestCUDASteadyState(t *testing.T) {
	cudatest.Use(t)
	const warm, rounds = 10, 60
	for _, kind := range []string{"ipc", "staged"} {
		var before, after runtime.MemStats
		err := comm.RunLocal(2, func(host comm.Comm) error {
			return onGPU(host, kind, func(d *cuda.Device, c *cuda.Comm) error {
				s, err := d.NewStream()
				if err != nil {
					return err
				}
				defer s.Close()
				b, err := d.Alloc(1 << 20)
				if err != nil {
					return err
				}
				all := tensor.Of(b.Pointer(), tensor.U8, b.Bytes())
				all.Where = tensor.CUDA
				src, dst, big, small := all.At(0, tensor.F32, 6, 4), all.At(256, tensor.F32, 6, 4),
					all.At(512, tensor.F32, 40000), all.At(400_000, tensor.F32, 5)
				rows, lo := []int64{3, 3}, int64(c.Rank())*3
				for i := range warm + rounds {
					if i == warm && c.Rank() == 0 {
						runtime.ReadMemStats(&before)
					}
					r, err := c.AllToAllStart(s, dst, src, rows, rows)
					if err != nil {
						return err
					}
					if err := errors.Join(c.AllReduce(s, big, comm.Sum), c.AllReduce(s, small, comm.Max), r.Wait(),
						c.AllToAll(s, dst, src, rows, rows), c.AllGather(s, dst, dst.Slice(0, lo, lo+3), rows),
						c.ReduceScatter(s, dst.Slice(0, 0, 3), src, rows), c.Broadcast(s, src, 1),
						c.SendRecv(s, dst, 1-c.Rank(), src, 1-c.Rank()), s.Sync()); err != nil {
						return err
					}
				}
				if c.Rank() == 0 {
					runtime.ReadMemStats(&after)
				}
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		if n := after.Mallocs - before.Mallocs; n > rounds/2 {
			t.Errorf("%s: %d allocations in %d rounds", kind, n, rounds)
		}
	}
}
