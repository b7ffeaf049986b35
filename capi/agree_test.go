package main

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/slurm"
)

// onRanks runs f on n ranks, which are goroutines with a context each. If a rank does not return,
// the test fails and prints the goroutines.
func onRanks(t *testing.T, n int, flags int32, f func(rank int, ctx uintptr)) {
	t.Helper()
	onRanksWith(t, n, cOptions{flags: flags}, f)
}

// onRanksWith is onRanks with options of the contexts.
func onRanksWith(t *testing.T, n int, options cOptions, f func(rank int, ctx uintptr)) {
	t.Helper()
	options.struct_size, options.threads = uint32(unsafe.Sizeof(options)), 1
	comms, done := comm.Local(n), make(chan error, n)
	for rank := range n {
		go func() {
			done <- guarded(func() error {
				var ctx uintptr
				o := options
				if err := newOnComm("onRanks", comms[rank], true, p(&o), p(&ctx)); err != nil {
					return err
				}
				f(rank, ctx)
				return nil
			})
		}()
	}
	limit := time.After(time.Minute) // the calls need less than a second
	for range n {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-limit:
			pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
			t.Fatal("a rank waits for a rank that has left the call")
		}
	}
}

// One rank calls a collective function with an invalid argument, and the other with valid ones. All
// ranks return the same status, the message names the rank, and the context accepts the next call.
// testdata/agree.c tests the functions with a callback.
func TestRanksAgreeOnRefusals(t *testing.T) {
	const ranks = 2
	results := make(chan error, ranks)
	onRanks(t, ranks, 0, func(rank int, ctx uintptr) {
		list := collectiveCalls(t, ctx)
		for i := range list {
			e := &list[i]
			must(t, guarded(e.valid))
			for _, fault := range sorted(e.invalid) {
				for at := range ranks {
					call := e.valid
					if rank == at {
						call = e.invalid[fault]
					}
					results <- guarded(call)
					if rank == 0 {
						checkRefusals(t, fmt.Sprintf("%s, %s, on rank %d", e.name, fault, at), at, <-results, <-results)
					}
					must(t, lossReduceOf(ctx)) // the other rank waits until rank 0 has checked
					must(t, guarded(e.valid))
				}
			}
		}
	})
}

// checkRefusals checks the results of both ranks for an invalid argument on rank `at`.
func checkRefusals(t *testing.T, what string, at int, x, y error) {
	if x == nil || y == nil || status.Of(x) != status.Of(y) {
		t.Errorf("%s: the ranks return %v and %v, want one status", what, x, y)
		return
	}
	for _, err := range []error{x, y} {
		if text := err.Error(); !strings.Contains(text, fmt.Sprint("rank ", at)) {
			t.Errorf("%s: the message does not name the rank: %s", what, text)
		} else if strings.Contains(what, ", small ") && !strings.Contains(text, " bytes and ") {
			t.Errorf("%s: the message does not have the bytes: %s", what, text)
		}
	}
}

func lossReduceOf(ctx uintptr) error {
	sum, count := 1.0, int64(1)
	return lossReduce(ctx, p(&sum), p(&count), nil)
}

// Options or out in unreadable memory on one rank: all ranks return an error.
func TestRanksAgreeOnUnreadableOptions(t *testing.T) {
	wild := uintptr(1 << 20)
	unreadable := *(*unsafe.Pointer)(p(&wild))
	for _, out := range []bool{false, true} {
		results := make(chan error, 2)
		for rank, c := range comm.Local(2) {
			go func() {
				var ctx uintptr
				o, to := unsafe.Pointer(nil), p(&ctx)
				if rank == 0 && out {
					to = unreadable
				} else if rank == 0 {
					o = unreadable
				}
				results <- guarded(func() error { return newOnComm("create", c, true, o, to) })
			}()
		}
		for range 2 {
			select {
			case err := <-results:
				refused(t, "unreadable memory", status.Internal, err)
			case <-time.After(10 * time.Second):
				t.Fatal("a rank waits for a rank that has left the call")
			}
		}
	}
}

// If ranks call different functions, the error names the functions.
func TestRanksAgreeOnTheFunction(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		list := collectiveCalls(t, ctx)
		err := guarded(list[rank*4].valid) // attention on rank 0, a reshard on rank 1
		refused(t, "two functions", status.InvalidArgument, err)
		if err != nil && !strings.Contains(err.Error(), "ulysses_attention_forward on rank 0") {
			t.Error(err)
		}
		must(t, lossReduceOf(ctx))
	})
}

// With ULYSSES_NO_AGREEMENT, only the rank with the invalid argument returns an error.
func TestNoAgreement(t *testing.T) {
	onRanks(t, 2, flagNoAgreement, func(rank int, ctx uintptr) {
		list := collectiveCalls(t, ctx)
		must(t, guarded(list[0].valid))
		if rank == 1 {
			refused(t, "q is NULL", status.InvalidArgument, guarded(list[0].invalid["q is NULL"]))
		}
		must(t, guarded(list[0].valid))
	})
}

// sorted returns the names of the invalid arguments, in the same order on all ranks.
func sorted(bad map[string]func() error) []string { return slices.Sorted(maps.Keys(bad)) }

// Ranks of one node divide the cores that all of them may use.
func TestShareOfCores(t *testing.T) {
	for _, n := range []int{1, 2} {
		err := comm.RunLocal(n, func(c comm.Comm) error {
			got, err := shareOfCores("test", c)
			cpus := float64(runtime.NumCPU())
			if limit := proc.CPULimit(slurm.Env().CPUs); limit > 0 {
				cpus = min(cpus, limit)
			}
			if want := max(1, int(cpus/float64(n))); got != want {
				t.Errorf("%d of %d ranks: %d threads, want %d", c.Rank(), n, got, want)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
