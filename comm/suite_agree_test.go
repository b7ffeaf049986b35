package comm

import (
	"errors"
	"fmt"
	"strings"

	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func suiteAgree(c Comm) error {
	if err := Agree(c, nil); err != nil {
		return err
	}
	bad := c.Size() - 1
	cause := errors.New("disk full")
	var mine error
	if c.Rank() == bad {
		mine = status.Errorf(status.IO, "checkpoint: %w", cause)
	}
	err := Agree(c, mine)
	if want := fmt.Sprintf("rank %d: checkpoint: disk full", bad); err == nil || err.Error() != want ||
		status.Of(err) != status.IO {
		return wrong("agree: %v (%v), want %q", err, status.Of(err), want)
	}
	if c.Rank() == bad && !errors.Is(err, cause) {
		return wrong("the error of the failing rank has lost its cause")
	}
	if !Told(err) || Told(mine) {
		return wrong("agree: the one error of all ranks is told: %t, before the ranks agreed: %t", Told(err),
			Told(mine))
	}
	err = Agree(c, status.Errorf(status.Code(1+c.Rank()%4), "step: fault %d", c.Rank()))
	want := fmt.Sprintf("rank %d: step: fault %d", c.Rank(), c.Rank())
	if c.Size() > 1 {
		want += fmt.Sprintf(" (%d of %d ranks failed)", c.Size(), c.Size())
	}
	if err == nil || err.Error() != want || status.Of(err) != status.InvalidArgument {
		return wrong("agree: %v (%v), want %q", err, status.Of(err), want)
	}
	if Told(err) != (c.Rank() == 0) {
		return wrong("agree: rank 0 has another fault than this rank, and told is %t", Told(err))
	}
	want = "rank 0: no such layer"
	if c.Size() > 1 {
		want = "no such layer" // the same on all ranks
	}
	if err = Agree(c, status.Errorf(status.Unsupported, "no such layer")); err == nil || err.Error() != want ||
		status.Of(err) != status.Unsupported || !Told(err) {
		return wrong("agree: %v (%v), want %q; told is %t", err, status.Of(err), want, Told(err))
	}
	return nil
}

func suiteSame(c Comm) error {
	if err := Same(c, "plan", Field{Name: "heads", Value: "8"}, Field{Name: "", Value: ""},
		Field{Name: "length", Value: "4096"}); err != nil {
		return err
	}
	bad := c.Size() - 1
	length := "4096"
	if c.Rank() == bad {
		length = "4097"
	}
	err := Same(c, "plan", Field{Name: "heads", Value: "8"}, Field{Name: "length", Value: length})
	if c.Size() == 1 {
		return err
	}
	want := fmt.Sprintf(
		"plan: length is 4097 on rank %d and 4096 on rank 0: it must be the same on all ranks (rank %d is on host %s, rank 0 on host %[3]s)",
		bad, bad, hostName())
	if err == nil || err.Error() != want || status.Of(err) != status.InvalidArgument {
		return wrong("same: %v, want %q", err, want)
	}
	if err := suiteSameCounts(c); err != nil {
		return err
	}
	return suiteSameLists(c, bad)
}

// suiteSameCounts checks ranks with different numbers of fields, which follow from a field that
// differs. Ranks above 1 have no fields.
func suiteSameCounts(c Comm) error {
	for _, isList := range []bool{false, true} {
		n := int64(c.Rank() % 2)
		fields := []Field{{Name: "n", Value: fmt.Sprint(n)}}
		want := "reshard: n is 1 on rank 1 and 0 on rank 0: it must be the same on all ranks"
		if isList {
			fields = []Field{List("n", make([]int64, n+1))}
			want = "reshard: n has 2 entries on rank 1 and 1 on rank 0: it must be the same on all ranks"
		}
		for i := range n + 1 {
			fields = append(fields, Field{Name: fmt.Sprint("width ", i), Value: "8"})
		}
		if c.Rank() > 1 {
			fields = fields[:0]
		}
		err := Same(c, "reshard", fields...)
		if err == nil || !strings.HasPrefix(err.Error(), want) || status.Of(err) != status.InvalidArgument {
			return wrong("counts of fields: %v, want %q", err, want)
		}
	}
	return nil
}

// suiteSameLists checks the errors for the first entry that differs, for lengths, and for a missing
// list.
func suiteSameLists(c Comm, bad int) error {
	for _, x := range []struct {
		root, other []int64
		want        string
	}{
		{[]int64{0, 4, 7}, []int64{0, 5, 7}, "starts[1] is 5 on rank %d and 4 on rank 0"},
		{[]int64{0, 4, 7}, []int64{0, 4}, "starts has 2 entries on rank %d and 3 on rank 0"},
		{nil, []int64{0, 4}, "starts has 2 entries on rank %d and is not given on rank 0"},
		{[]int64{0, 4}, nil, "starts is not given on rank %d and has 2 entries on rank 0"},
		{nil, []int64{}, "starts has 0 entries on rank %d and is not given on rank 0"},
		{[]int64{}, nil, "starts is not given on rank %d and has 0 entries on rank 0"},
		{[]int64{0, 4}, []int64{0, 4}, ""},
	} {
		list := x.root
		if c.Rank() == bad {
			list = x.other
		}
		err := Same(c, "batch", Field{Name: "seq", Value: "9"}, List("starts", list))
		if x.want == "" {
			if err != nil {
				return err
			}
			continue
		}
		want := "batch: " + fmt.Sprintf(x.want, bad) + ": it must be the same on all ranks"
		if err == nil || err.Error() != want || status.Of(err) != status.InvalidArgument {
			return wrong("lists: %v, want %q", err, want)
		}
	}
	return nil
}

func suiteCounted(c Comm) error {
	l, clk := NewLedger(), clock.New()
	k := NewCounted(c, "sequence", l, clk, nil)
	n, r := int64(c.Size()), int64(c.Rank())
	recv, send := allToAllRows(c, 1)
	src, dst := newTensor(tensor.BF16, total(send), 5), newTensor(tensor.BF16, total(recv), 5)
	if err := k.AllToAll(nil, dst, src, recv, send); err != nil {
		return err
	}
	request, err := k.AllToAllStart(nil, dst, src, recv, send)
	if err != nil {
		return err
	}
	if err := request.Wait(); err != nil {
		return err
	}
	rows := make([]int64, n)
	for j := range rows {
		rows[j] = int64(j) + 1
	}
	whole, part := newTensor(tensor.F32, total(rows), 2), newTensor(tensor.F32, r+1, 2)
	to := int((r + 1) % n)
	err = errors.Join(k.AllReduce(nil, newTensor(tensor.F32, 10), Sum), k.AllGather(nil, whole, part, rows),
		k.ReduceScatter(nil, part, whole, rows), k.Broadcast(nil, newTensor(tensor.I32, 9), 0),
		k.SendRecv(nil, newTensor(tensor.U8, 3), int((r-1+n)%n), newTensor(tensor.U8, 3), to), k.Barrier())
	if err != nil {
		return err
	}
	var exchanged int64
	for j := range int(n) {
		if j != int(r) {
			exchanged += rowsBetween(int(r), j) * 5 * 2
		}
	}
	lo, hi := Shard(10, n, r)
	sent := map[string]int64{OpAllToAll: 2 * exchanged, OpAllReduce: 4 * (10 - (hi - lo) + (n-1)*(hi-lo)),
		OpAllGather: (n - 1) * (r + 1) * 8, OpReduceScatter: (n*(n+1)/2 - r - 1) * 8, OpBroadcast: 36, OpSendRecv: 3,
		OpBarrier: 0}
	if r == n-1 {
		sent[OpBroadcast] = 0
	}
	if n == 1 {
		sent[OpSendRecv] = 0
	}
	for op, want := range sent {
		e, calls := l.Get("sequence", op), int64(1)
		if op == OpAllToAll {
			calls = 2
		}
		if e.Bytes != want || e.Calls != calls || e.Seconds <= 0 {
			return wrong("%s: %+v, want %d calls and %d bytes", op, e, calls, want)
		}
	}
	// Over all ranks, the all-reduce of n elements sends 2(P-1)·n elements.
	bytes := []int64{l.Get("sequence", OpAllReduce).Bytes}
	if err := c.AllReduce(nil, int64s(bytes), Sum); err != nil {
		return err
	}
	if bytes[0] != 2*(n-1)*40 {
		return wrong("all-reduce sent %d bytes in all, want %d", bytes[0], 2*(n-1)*40)
	}
	calls := map[string]int64{}
	for _, p := range clk.Phases() {
		calls[p.Name] = p.Calls
	}
	if calls["exchange"] != 4 || calls["reduce"] != 5 || len(calls) != 2 {
		return wrong("clock: %v", clk.Phases())
	}
	return nil
}

func suiteMesh(c Comm) error {
	n := c.Size()
	for _, d := range [][2]int{{0, 1}, {1, 1}, {2, 1}, {n, 1}, {n + 1, 1}, {-1, 1}, {0, 2}, {1, 2}, {2, 2}, {1, n},
		{1, -1}, {0, n + 1}} {
		ulysses, ring := d[0], d[1]
		m, err := NewMesh(c, ulysses, ring, NewLedger(), nil, nil)
		if ulysses == 0 && ring > 0 {
			ulysses = n / ring
		}
		p := ulysses * ring
		if p <= 0 || n%p != 0 {
			if status.Of(err) != status.InvalidConfig {
				return wrong("mesh %d x %d of %d ranks: %v", ulysses, ring, n, err)
			}
			continue
		}
		if err != nil {
			return err
		}
		if m.Seq.Size() != p || m.Seq.Rank() != c.Rank()%p || m.Data.Size() != n/p || m.Data.Rank() != c.Rank()/p ||
			m.Replica != c.Rank()/p || m.Replicas != n/p || m.Ulysses != ulysses || m.Ring != ring ||
			m.World.Size() != n {
			return wrong("mesh %d x %d of %d ranks: %+v", ulysses, ring, n, m)
		}
		x := []int32{int32(c.Rank())}
		if err := m.Data.AllReduce(nil, tensor.OfInt32(x, 1), Sum); err != nil {
			return err
		}
		if want := int32(m.Replicas*m.Seq.Rank() + p*m.Replicas*(m.Replicas-1)/2); x[0] != want {
			return wrong("sum of ranks over data: %d, want %d", x[0], want)
		}
		if err := errors.Join(m.Seq.Close(), m.Data.Close()); err != nil {
			return err
		}
	}
	return nil
}
