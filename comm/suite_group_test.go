package comm

import (
	"errors"
	"sync"

	"ulysses/internal/status"
	"ulysses/tensor"
)

func suiteSplit(c Comm) error {
	color := 0 // group 1: rank 0; no group: rank 2; group 0: the other ranks, in reverse
	if c.Rank() == 0 {
		color = 1
	}
	if c.Rank() == 2 {
		color = -1
	}
	sub, err := c.Split(color, -c.Rank())
	if err != nil {
		return err
	}
	if color < 0 {
		if sub != nil {
			return wrong("a rank with a negative color got a communicator: %v", sub)
		}
		return nil
	}
	members := []int{0}
	if color == 0 {
		members = nil
		for r := c.Size() - 1; r > 0; r-- {
			if r != 2 {
				members = append(members, r)
			}
		}
	}
	if sub.Size() != len(members) || members[sub.Rank()] != c.Rank() {
		return wrong("group %d: rank %d of %d", color, sub.Rank(), sub.Size())
	}
	if err := suiteAllToAll(sub); err != nil {
		return err
	}
	all := make([]int32, len(members))
	ones := make([]int64, len(members))
	for i := range ones {
		ones[i] = 1
	}
	if err := sub.AllGather(nil, tensor.OfInt32(all, int64(len(all))), tensor.OfInt32([]int32{int32(c.Rank())}, 1),
		ones); err != nil {
		return err
	}
	for i := range all {
		if int(all[i]) != members[i] {
			return wrong("group %d has %v, want %v", color, all, members)
		}
	}
	return sub.Close()
}

// suiteConcurrent uses two communicators of the same ranks from two goroutines at once.
func suiteConcurrent(c Comm) error {
	const rounds = 20
	subs := make([]Comm, 3)
	for i := range subs {
		var err error
		if subs[i], err = c.Split(0, c.Rank()); err != nil {
			return err
		}
	}
	errs := make([]error, len(subs))
	var wg sync.WaitGroup
	for i, sub := range subs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for round := range int64(rounds) {
				recv, send := allToAllRows(sub, 1+round*40)
				src, dst := newTensor(tensor.F32, total(send), 3), newTensor(tensor.F32, total(recv), 3)
				fillSend(sub, src, send, round+int64(i))
				if errs[i] = sub.AllToAll(nil, dst, src, recv, send); errs[i] != nil {
					return
				}
				if errs[i] = checkRecv(sub, dst, recv, round+int64(i)); errs[i] != nil {
					return
				}
			}
		}()
	}
	wg.Wait()
	for _, sub := range subs {
		errs = append(errs, sub.Close())
	}
	return errors.Join(errs...)
}

// suiteRefusals makes calls with arguments that are wrong on every rank. Each must return an error
// before it communicates.
func suiteRefusals(c Comm) error {
	n := c.Size()
	rows := make([]int64, n)
	rows[0] = 1
	t, u := newTensor(tensor.F32, 4, 4), newTensor(tensor.F32, 4, 4)
	bad := func(i int64) []int64 { r := append([]int64(nil), rows...); r[0] = i; return r }
	device := t
	device.Where = tensor.CUDA
	lost := t
	lost.Data = nil
	for i, call := range []func() error{
		func() error { return c.AllToAll(nil, t, u, rows, append(rows, 0)) },
		func() error { return c.AllToAll(nil, t, u, bad(5), rows) },
		func() error { return c.AllToAll(nil, t, u, rows, bad(-1)) },
		func() error { return c.AllToAll(nil, t.Permute(1, 0), u, rows, rows) },
		func() error { return c.AllToAll(nil, t, t, rows, rows) },
		func() error { return c.AllToAll(nil, t, newTensor(tensor.F32, 4, 3), rows, rows) },
		func() error { return c.AllToAll(nil, t, lost, rows, rows) },
		func() error { return c.AllReduce(nil, newTensor(tensor.U8, 3), Sum) },
		func() error { return c.AllReduce(nil, t, Op(9)) },
		func() error { return c.AllReduce(nil, device, Sum) },
		func() error { return c.Broadcast(nil, t, n) },
		func() error { return c.Broadcast(nil, t, -1) },
		func() error { return c.SendRecv(nil, t, n, u, 0) },
		func() error { return c.AllGather(nil, t, u, bad(5)) },
		func() error { return c.ReduceScatter(nil, u, t, rows[1:]) },
	} {
		err := call()
		if code := status.Of(err); code != status.InvalidArgument && code != status.Unsupported {
			return wrong("call %d: %v (%v)", i, err, code)
		}
	}
	return c.Barrier()
}
