package comm

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"ulysses/internal/clock"
	"ulysses/tensor"
)

// TestLocalWaiting checks that the time until the last rank is there counts as waiting, and that
// the time after it does not. The clock moves only when the late rank moves it.
func TestLocalWaiting(t *testing.T) {
	const n, late = 3, 2
	const before, after = time.Hour, time.Minute
	for name, call := range map[string]func(c Comm, advance func()) error{
		"all-to-all": func(c Comm, advance func()) error {
			rows := []int64{1, 1, 1}
			r, err := c.AllToAllStart(nil, newTensor(tensor.F32, n), newTensor(tensor.F32, n), rows, rows)
			if err != nil {
				return err
			}
			advance()
			return r.Wait()
		},
		"barrier":    func(c Comm, advance func()) error { return c.Barrier() },
		"all-reduce": func(c Comm, advance func()) error { return c.AllReduce(nil, newTensor(tensor.F32, 1<<18), Sum) },
		"send-receive": func(c Comm, advance func()) error {
			// Rank 1 receives from rank 0 at once. Then it waits until the late rank receives.
			r := c.Rank()
			return c.SendRecv(nil, newTensor(tensor.F32, 5), (r+n-1)%n, newTensor(tensor.F32, 5), (r+1)%n)
		},
	} {
		ranks := Local(n)
		g := ranks[0].(*localComm).g
		base, passed := time.Now(), atomic.Int64{}
		g.job.now = func() time.Time { return base.Add(time.Duration(passed.Load())) }
		ledgers := make([]*Ledger, n)
		done := make(chan error, n)
		for i, c := range ranks {
			ledgers[i] = NewLedger()
			go func() {
				k := NewCounted(c, "world", ledgers[i], nil, nil)
				if i == late {
					for !blocked(ranks, name, n-1) {
						runtime.Gosched()
					}
					passed.Add(int64(before))
				}
				done <- call(k, func() {
					if i == late {
						passed.Add(int64(after))
					}
				})
			}()
		}
		err := within(t, func() (err error) {
			for range n {
				if e := <-done; e != nil {
					err = e
				}
			}
			return err
		})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i, l := range ledgers {
			want := before.Seconds()
			if i == late {
				want = 0
			}
			if e := l.Entries()[0]; e.Waiting != want {
				t.Errorf("%s, rank %d: %v s of waiting, want %v", name, i, e.Waiting, want)
			}
		}
	}
}

// blocked reports whether n ranks wait in a call.
func blocked(ranks []Comm, name string, n int) bool {
	g := ranks[0].(*localComm).g
	g.mu.Lock()
	defer g.mu.Unlock()
	if name == "send-receive" { // rank 1 has received from rank 0 and waits for its receiver
		return ranks[0].(*localComm).message.done && len(g.queue[1*3+2]) == 1
	}
	o := g.calls[0]
	if o == nil {
		return false
	}
	waits := o.arrived[0]
	for i := range o.posts {
		if o.posts[i].waiting {
			waits++
		}
	}
	return waits == n
}

// TestWaiting runs suiteWaiting with the clock of the system.
func TestWaiting(t *testing.T) {
	if err := within(t, func() error { return RunLocal(3, suiteWaiting) }); err != nil {
		t.Error(err)
	}
}

// suiteWaiting lets the last rank start each call late. The others must attribute most of their
// time to waiting, and the late rank must not. A busy machine can delay the other ranks as long as
// the late one, so a call has several attempts; with a wrong attribution all of them fail.
func suiteWaiting(c Comm) error {
	if _, ok := c.(Waiter); !ok || c.Size() == 1 {
		return nil
	}
	n, r := c.Size(), c.Rank()
	const late, elements, attempts = 250 * time.Millisecond, 1 << 16, 8
	rows := make([]int64, n)
	for j := range rows {
		rows[j] = elements
	}
	x, y := newTensor(tensor.F32, elements*int64(n)), newTensor(tensor.F32, elements*int64(n))
	calls := []struct {
		op    string
		early func(rank int) bool // the rank waits for the late one
		call  func(k Comm) error
	}{
		{OpAllToAll, func(int) bool { return true }, func(k Comm) error { return k.AllToAll(nil, y, x, rows, rows) }},
		{OpAllToAll, func(int) bool { return true }, func(k Comm) error {
			q, err := k.AllToAllStart(nil, y, x, rows, rows)
			if err != nil {
				return err
			}
			return q.Wait()
		}},
		{OpAllGather, func(int) bool { return true }, func(k Comm) error {
			own := tensor.Of(blockAt(x.Data, 0, elements), tensor.F32, elements)
			return k.AllGather(nil, y, own, rows)
		}},
		{OpSendRecv, func(rank int) bool { return rank == 0 }, func(k Comm) error {
			return k.SendRecv(nil, y, (r+n-1)%n, x, (r+1)%n)
		}},
	}
	for i, x := range calls {
		for attempt := 1; ; attempt++ {
			if err := c.Barrier(); err != nil {
				return err
			}
			if r == n-1 {
				time.Sleep(late)
			}
			l, clk := NewLedger(), clock.New()
			if err := x.call(NewCounted(c, "world", l, clk, nil)); err != nil {
				return err
			}
			e, ok := l.Get("world", x.op), []int32{1}
			most := e.Waiting > e.Seconds/2
			if r == n-1 && most || x.early(r) && r != n-1 && !most {
				ok[0] = 0
			}
			if p := clk.Phases()[0]; p.Waiting != e.Waiting || !(e.Waiting <= e.Seconds) {
				return wrong("call %d: %+v in the ledger, %+v on the clock", i, e, p)
			}
			if err := c.AllReduce(nil, tensor.OfInt32(ok, 1), Min); err != nil {
				return err
			}
			if ok[0] == 1 {
				break
			}
			if attempt == attempts {
				return wrong("call %d, %s: rank %d waited %.3g s of %.3g s", i, x.op, r, e.Waiting, e.Seconds)
			}
		}
	}
	return nil
}
