package comm

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// nodeMaps are nodes of ranks, by number of ranks: one node, one rank a node, ranks in the order of
// nodes, and in another order.
var nodeMaps = map[int][][]int{
	2: {{0, 0}, {0, 1}},
	3: {{7, 3, 5}},
	4: {{0, 0, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 1}},
	6: {{0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2}, {2, 0, 1, 1, 0, 2}},
	8: {{0, 0, 0, 0, 1, 1, 1, 1}, {0, 1, 2, 3, 0, 1, 2, 3}},
}

// twoLevelSuite are the tests of all communicators in which all-to-alls run.
var twoLevelSuite = []string{"AllToAllUneven", "AllToAllEmpty", "AllToAllStart", "Split", "Refusals", "Counted"}

// suiteTwoLevel runs tests of all communicators, and tests of its own, on two levels.
func suiteTwoLevel(c Comm) error {
	for _, nodeOf := range nodeMaps[c.Size()] {
		dup, err := c.Split(0, c.Rank())
		if err != nil {
			return err
		}
		t, err := NewTwoLevel(dup, nodeOf)
		if err != nil {
			return err
		}
		for _, s := range suite {
			if !slices.Contains(twoLevelSuite, s.Name) {
				continue
			}
			if err := s.Run(t); err != nil {
				return fmt.Errorf("nodes %v: %s: %w", nodeOf, s.Name, err)
			}
		}
		for _, run := range []func(*TwoLevel, []int) error{twoLevelTraffic, twoLevelSteady} {
			if err := run(t, nodeOf); err != nil {
				return fmt.Errorf("nodes %v: %w", nodeOf, err)
			}
		}
		if err := errors.Join(t.Close(), t.Close()); err != nil {
			return err
		}
		if err := t.AllToAll(nil, tensor.Tensor{}, tensor.Tensor{}, nodes64(nodeOf),
			nodes64(nodeOf)); status.Of(err) != status.InvalidArgument {
			return wrong("an all-to-all after Close: %v", err)
		}
	}
	return nil
}

func nodes64(nodeOf []int) []int64 { return make([]int64, len(nodeOf)) }

// twoLevelTraffic compares the counters with the formula, for equal and for unequal blocks. Nodes
// exchange the same bytes as without levels, in messages that are N times as long.
func twoLevelTraffic(t *TwoLevel, nodeOf []int) error {
	perNode := len(t.ranks[0])
	for _, bytes := range []func(from, to int) int64{
		func(int, int) int64 { return 36 },
		func(from, to int) int64 { return 6 * rowsBetween(from, to) },
	} {
		recv, send := make([]int64, t.Size()), make([]int64, t.Size())
		for j := range send {
			recv[j], send[j] = bytes(j, t.Rank()), bytes(t.Rank(), j)
		}
		src, dst := newTensor(tensor.U8, total(send)), newTensor(tensor.U8, total(recv))
		fillSend(t, src, send, 3)
		was := t.Moved()
		if err := t.AllToAll(nil, dst, src, recv, send); err != nil {
			return err
		}
		if err := checkRecv(t, dst, recv, 3); err != nil {
			return err
		}
		now := t.Moved()
		got := Traffic{now.InsideBytes - was.InsideBytes, now.BetweenBytes - was.BetweenBytes,
			now.InsideMessages - was.InsideMessages, now.BetweenMessages - was.BetweenMessages,
			now.CountBytes - was.CountBytes}
		want, err := TwoLevelTraffic(t.Rank(), nodeOf, bytes)
		if err != nil || got != want {
			return wrong("sent %+v, want %+v (%v)", got, want, err)
		}
	}
	same := func(int, int) int64 { return 36 }
	sent, err := TwoLevelTraffic(t.Rank(), nodeOf, same)
	direct := DirectTraffic(t.Rank(), nodeOf, same)
	nodes := int64(len(t.ranks))
	if err != nil || sent.BetweenBytes != direct.BetweenBytes || sent.BetweenMessages != nodes-1 ||
		direct.BetweenMessages != int64(perNode)*(nodes-1) {
		return wrong("two levels send %+v, directly %+v: %v", sent, direct, err)
	}
	return nil
}

// twoLevelSteady checks that calls in the steady state allocate nothing, also while requests are in
// progress.
func twoLevelSteady(t *TwoLevel, _ []int) error {
	rows := make([]int64, t.Size())
	for j := range rows {
		rows[j] = 700
	}
	src, a, b := newTensor(tensor.F32, total(rows)), newTensor(tensor.F32, total(rows)),
		newTensor(tensor.F32, total(rows))
	var before, after runtime.MemStats
	const warm, rounds = 5, 50
	for i := range warm + rounds {
		if i == warm {
			runtime.ReadMemStats(&before)
		}
		r, err := t.AllToAllStart(nil, a, src, rows, rows)
		if err != nil {
			return err
		}
		if err := errors.Join(t.AllToAll(nil, b, src, rows, rows), r.Wait()); err != nil {
			return err
		}
	}
	runtime.ReadMemStats(&after)
	if n := after.Mallocs - before.Mallocs; n > 4*rounds {
		return wrong("%d allocations in %d rounds", n, rounds)
	}
	return nil
}

func TestTwoLevel(t *testing.T) {
	for n := range nodeMaps {
		if err := within(t, func() error { return RunLocal(n, suiteTwoLevel) }); err != nil {
			t.Errorf("%d ranks: %v", n, err)
		}
	}
}

func TestTwoLevelRefuses(t *testing.T) {
	for _, x := range []struct {
		nodeOf []int
		code   status.Code
		text   string
	}{
		{[]int{0, 0, 1}, status.InvalidArgument, "3 nodes for 4 ranks"},
		{[]int{0, 0, 0, 1}, status.Unsupported, "the node of rank 3 has 1 ranks, the node of rank 0 has 3"},
		{nil, status.InvalidArgument, "nodeOf[2] is 1 on rank 1 and 0 on rank 0"},
	} {
		errs := make([]error, 4)
		err := RunLocal(4, func(c Comm) error {
			nodeOf := slices.Clone(x.nodeOf)
			if x.nodeOf == nil {
				nodeOf = []int{0, 0, c.Rank() % 2, 1}
			}
			_, errs[c.Rank()] = NewTwoLevel(c, nodeOf)
			return c.Barrier()
		})
		if err != nil {
			t.Error(err)
		}
		for r := range errs {
			mustBe(t, fmt.Sprintf("rank %d", r), errs[r], x.code, x.text)
		}
	}
	host, err := NewHost(0, 1, func(in, out []byte) error { copy(out, in); return nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = NewTwoLevel(host, []int{0})
	mustBe(t, "host", err, status.Unsupported, `communicators of kind "host" have no two-level all-to-all`)
}

// TestTwoLevelEnds checks that all ranks return when one ends the job while requests are in
// progress.
func TestTwoLevelEnds(t *testing.T) {
	err := within(t, func() error {
		return RunLocal(4, func(c Comm) error {
			x, err := NewTwoLevel(c, []int{0, 0, 1, 1})
			if err != nil {
				return err
			}
			rows := []int64{1, 1, 1, 1}
			if c.Rank() == 2 {
				return status.Errorf(status.Numeric, "loss is NaN")
			}
			r, err := x.AllToAllStart(nil, newTensor(tensor.F32, 4), newTensor(tensor.F32, 4), rows, rows)
			if err != nil {
				return err
			}
			return r.Wait()
		})
	})
	mustBe(t, "RunLocal", err, status.Numeric, "rank 2: loss is NaN")
}

// The cost model prefers two levels where the overhead of messages between nodes dominates, and the
// direct all-to-all for large messages, on one node, and with one rank a node.
func TestLinks(t *testing.T) {
	l := Links{Inside: Link{Latency: 1e-6, Overhead: 0.5e-6, Bandwidth: 10e9},
		Between: Link{Latency: 20e-6, Overhead: 5e-6, Bandwidth: 2e9}, CopyBandwidth: 10e9}
	const mib = float64(1 << 20)
	direct, two := l.AllToAllSeconds(4, 8, 1<<20)
	// direct: 24 messages and 3/4 of the bytes between nodes, which take longer than the ones
	// inside
	wantDirect := 20e-6 + 24*5e-6 + 0.75*mib/2e9
	// counts of 8·4·7 bytes and 7/8 of the bytes inside, 3 messages between nodes, two copies
	wantTwo := 2*(1e-6+7*0.5e-6) + (224+0.875*mib)/10e9 + 20e-6 + 3*5e-6 + 0.75*mib/2e9 + 2*mib/10e9
	if got, want := []float64{direct, two}, []float64{wantDirect, wantTwo}; !(math.Abs(got[0]-want[0]) < 1e-12) ||
		!(math.Abs(got[1]-want[1]) < 1e-12) {
		t.Errorf("%v s, want %v", got, want)
	}
	for _, x := range []struct {
		nodes, perNode int
		bytes          int64
		want           bool
	}{{4, 8, 64 << 10, true}, {4, 8, 1 << 30, false}, {1, 8, 1 << 10, false}, {8, 1, 1 << 10, false}} {
		if got := l.TwoLevel(x.nodes, x.perNode, x.bytes); got != x.want {
			t.Errorf("%+v: %v", x, got)
		}
	}
}
