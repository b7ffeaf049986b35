package comm

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func TestLocal(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4, 8} {
		for _, s := range suite {
			t.Run(fmt.Sprintf("%s/%d", s.Name, n), func(t *testing.T) {
				if err := within(t, func() error { return RunLocal(n, s.Run) }); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// within fails the test with the stacks of all goroutines if f does not return in time.
func within(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(3 * time.Minute):
		buffer := make([]byte, 1<<20)
		t.Fatalf("hangs:\n%s", buffer[:runtime.Stack(buffer, true)])
		return nil
	}
}

// TestRunLocalEnds checks that all ranks return after a failure of one, and that RunLocal returns
// the first cause.
func TestRunLocalEnds(t *testing.T) {
	cause := errors.New("no such thing")
	waits := map[string]func(Comm) error{
		"barrier":    func(c Comm) error { return c.Barrier() },
		"all-to-all": func(c Comm) error { return suiteAllToAll(c) },
		"started":    func(c Comm) error { return suiteStart(c) },
		"pair":       func(c Comm) error { return suiteSendRecv(c) },
		"allreduce":  func(c Comm) error { return suiteAllReduce(c) },
	}
	faults := []struct {
		name string
		run  func(Comm) error
		code status.Code
		text string
	}{
		{"error", func(Comm) error { return status.Errorf(status.IO, "reading: %w", cause) }, status.IO,
			"rank 1: reading: no such thing"},
		{"panic", func(Comm) error { panic("boom") }, status.Internal, "rank 1: panic: boom"},
		{"goexit", func(Comm) error { runtime.Goexit(); return nil }, status.Internal, "rank 1: "},
		{"abort", func(c Comm) error { c.Abort(status.Numeric, "loss is NaN"); return nil }, status.Comm,
			"rank 1 ended the job (numeric): loss is NaN"},
		{"return", func(Comm) error { return nil }, status.Comm, "rank 1 ended while rank"},
	}
	for where, wait := range waits {
		for _, f := range faults {
			t.Run(f.name+"/"+where, func(t *testing.T) {
				others := make([]error, 4)
				err := within(t, func() error {
					return RunLocal(4, func(c Comm) error {
						if c.Rank() == 1 {
							if err := c.Barrier(); err != nil {
								return err
							}
							return f.run(c)
						}
						if others[c.Rank()] = c.Barrier(); others[c.Rank()] == nil {
							others[c.Rank()] = wait(c)
						}
						if err := c.Barrier(); status.Of(err) != status.Comm {
							return fmt.Errorf("a call after the job has ended: %v", err)
						}
						return others[c.Rank()]
					})
				})
				if status.Of(err) != f.code || !strings.Contains(err.Error(), f.text) {
					t.Errorf("RunLocal: %v (%v), want %q (%v)", err, status.Of(err), f.text, f.code)
				}
				for r, e := range others {
					if r != 1 && status.Of(e) != status.Comm {
						t.Errorf("rank %d: %v", r, e)
					}
				}
			})
		}
	}
}

// TestLocalAbortLeavesMemory checks that after an abort during a call, a rank returns only when no
// other rank uses its memory. The test unmaps the memory at once.
func TestLocalAbortLeavesMemory(t *testing.T) {
	const n, bytes = 3, 3 << 20
	for name, call := range map[string]func(c Comm, dst, src tensor.Tensor, rows []int64) error{
		"all-to-all": func(c Comm, dst, src tensor.Tensor, rows []int64) error {
			return c.AllToAll(nil, dst, src, rows, rows)
		},
		"reduce": func(c Comm, dst, src tensor.Tensor, rows []int64) error { return c.AllReduce(nil, src, Sum) },
		"gather": func(c Comm, dst, src tensor.Tensor, rows []int64) error {
			return c.AllGather(nil, dst, src.Slice(0, 0, rows[0]), rows)
		},
		"pair": func(c Comm, dst, src tensor.Tensor, rows []int64) error {
			return c.SendRecv(nil, dst, (c.Rank()+1)%n, src, (c.Rank()+2)%n)
		},
	} {
		t.Run(name, func(t *testing.T) {
			for round := range 12 {
				err := within(t, func() error {
					return RunLocal(n, func(c Comm) error {
						var memory [2][]byte
						for i := range memory {
							var err error
							if memory[i],
								err = syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE,
								syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_POPULATE); err != nil {
								return err
							}
							defer syscall.Munmap(memory[i])
						}
						dst, src := bytesOf(memory[0]).At(0, tensor.F32, bytes/4),
							bytesOf(memory[1]).At(0, tensor.F32, bytes/4)
						if err := c.Barrier(); err != nil {
							return err
						}
						if c.Rank() == 0 {
							time.AfterFunc(time.Duration(50+100*round)*time.Microsecond,
								func() { c.Abort(status.Internal, "now") })
						}
						for {
							if err := call(c, dst, src, []int64{bytes / 12, bytes / 12, bytes / 12}); err != nil {
								return err
							}
						}
					})
				})
				if status.Of(err) != status.Comm {
					t.Fatal(err)
				}
			}
		})
	}
}

func TestLocalMismatch(t *testing.T) {
	f32 := func(n int64) tensor.Tensor { return newTensor(tensor.F32, n) }
	odd := func(c Comm) int64 { return int64(c.Rank() % 2) }
	for name, run := range map[string]func(Comm) error{
		"order": func(c Comm) error {
			if c.Rank() == 0 {
				return c.Barrier()
			}
			return c.AllReduce(nil, f32(1), Sum)
		},
		"reduce":    func(c Comm) error { return c.AllReduce(nil, f32(5+odd(c)), Sum) },
		"large":     func(c Comm) error { return c.AllReduce(nil, f32(50000+odd(c)), Sum) },
		"op":        func(c Comm) error { return c.AllReduce(nil, f32(5), Op(odd(c))) },
		"broadcast": func(c Comm) error { return c.Broadcast(nil, f32(5+odd(c)), 0) },
		"root":      func(c Comm) error { return c.Broadcast(nil, f32(5), int(odd(c))) },
		"all-to-all": func(c Comm) error {
			rows := []int64{1, 1, 1 + odd(c)}
			return c.AllToAll(nil, f32(9), f32(9), rows, rows)
		},
		"gather":  func(c Comm) error { return c.AllGather(nil, f32(9), f32(3), []int64{1, 1, 1 + odd(c)}) },
		"scatter": func(c Comm) error { return c.ReduceScatter(nil, f32(3), f32(9), []int64{1, 1, 1 + odd(c)}) },
		"pair":    func(c Comm) error { return c.SendRecv(nil, f32(3), (c.Rank()+1)%3, f32(3+odd(c)), (c.Rank()+2)%3) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := within(t, func() error { return RunLocal(3, run) }); status.Of(err) != status.Comm ||
				!strings.Contains(err.Error(), "rank") {
				t.Errorf("%v (%v)", err, status.Of(err))
			}
		})
	}
}

// TestLocalSteadyState checks that nothing is allocated after the first calls.
func TestLocalSteadyState(t *testing.T) {
	const warm, rounds = 20, 200
	var before, after runtime.MemStats
	err := RunLocal(2, func(c Comm) error {
		k := NewCounted(c, "sequence", NewLedger(), nil, NewWatch(time.Minute, "here", nil))
		rows := []int64{3, 3}
		src, dst, big, small := newTensor(tensor.F32, 6, 4), newTensor(tensor.F32, 6, 4), newTensor(tensor.F32, 40000),
			newTensor(tensor.F32, 5)
		for i := range warm + rounds {
			if i == warm && c.Rank() == 0 {
				runtime.ReadMemStats(&before)
			}
			r, err := k.AllToAllStart(nil, dst, src, rows, rows)
			if err != nil {
				return err
			}
			if err := errors.Join(k.AllReduce(nil, big, Sum), k.AllReduce(nil, small, Max), r.Wait(),
				k.AllToAll(nil, dst, src, rows, rows),
				k.AllGather(nil, dst, dst.Slice(0, int64(c.Rank())*3, int64(c.Rank())*3+3), rows),
				k.ReduceScatter(nil, dst, src, rows), k.Broadcast(nil, src, 1),
				k.SendRecv(nil, dst, 1-c.Rank(), src, 1-c.Rank()), k.Barrier()); err != nil {
				return err
			}
		}
		if c.Rank() == 0 {
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

// declines is a communicator that does not broadcast bytes in its own way, as one of MPI that was
// split from another one.
type declines struct{ Comm }

func (declines) broadcastBytes([]byte, int) (bool, error) { return false, nil }

// The bytes of a broadcast are counted once, also if a communicator has declined to send them.
func TestBroadcastBytesIsCountedOnce(t *testing.T) {
	const text = "job"
	if err := RunLocal(2, func(c Comm) error {
		l := NewLedger()
		got, err := BroadcastBytes(NewCounted(declines{c}, "world", l, clock.New(), nil), []byte(text), 0)
		if err != nil {
			return err
		}
		want := Entry{Axis: "world", Op: OpBroadcast, Calls: 2} // the length, and the text
		if c.Rank() == 0 {
			want.Bytes = 8 + int64(len(text))
		}
		if e := l.Get("world", OpBroadcast); string(got) != text || e.Calls != want.Calls || e.Bytes != want.Bytes {
			return wrong("%q was broadcast, %+v was counted, want %+v", got, e, want)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
