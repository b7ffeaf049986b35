package slowlinks

import (
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// still is the clock of a rank that moves only when a test moves it. SleepUntil notes its argument
// and returns at once.
type still struct {
	mu    sync.Mutex
	now   time.Duration
	slept []time.Duration
}

func (c *still) Now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *still) SleepUntil(t time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.slept = append(c.slept, t)
}

const ms = time.Millisecond

// 1000 bytes take 1 ms, and a message arrives 10 ms after its last byte has left.
var links = Links{Latency: 10 * ms, Bandwidth: 1e6}

// times runs f on n ranks and returns, by rank, until when their calls have slept.
func times(t *testing.T, n int, f func(c *Comm, clock *still) error) [][]time.Duration {
	t.Helper()
	clocks := make([]still, n)
	err := comm.RunLocal(n, func(inner comm.Comm) error {
		clock := &clocks[inner.Rank()]
		c, err := New(inner, links, clock)
		if err != nil {
			return err
		}
		if err := f(c, clock); err != nil {
			return err
		}
		return c.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
	slept := make([][]time.Duration, n)
	for r := range clocks {
		slept[r] = clocks[r].slept
	}
	return slept
}

func bytes(n int64) tensor.Tensor {
	if n == 0 {
		return tensor.Tensor{}
	}
	b := make([]byte, n)
	return tensor.Of(unsafe.Pointer(&b[0]), tensor.U8, n)
}

func expect(t *testing.T, what string, got [][]time.Duration, want ...[]time.Duration) {
	t.Helper()
	for r := range want {
		if !slices.Equal(got[r], want[r]) {
			t.Errorf("%s: rank %d slept until %v, want %v", what, r, got[r], want[r])
		}
	}
}

// The messages of a rank follow one another on its link, first to the next rank. Blocks for a rank
// itself and empty blocks are free. A second all-to-all is behind the first.
func TestAllToAll(t *testing.T) {
	rows := [][]int64{{5000, 1000, 2000}, {0, 0, 0}, {3000, 0, 1000}} // by sender
	got := times(t, 3, func(c *Comm, _ *still) error {
		recv, send := make([]int64, 3), rows[c.Rank()]
		all, sent := int64(0), int64(0)
		for j := range recv {
			recv[j] = rows[j][c.Rank()]
			all, sent = all+recv[j], sent+send[j]
		}
		src := bytes(sent)
		first, err := c.AllToAllStart(nil, bytes(all), src, recv, send)
		if err != nil {
			return err
		}
		second, err := c.AllToAllStart(nil, bytes(all), src, recv, send)
		if err != nil {
			return err
		}
		if err := second.Wait(); err != nil {
			return err
		}
		return first.Wait()
	})
	// rank 0: to rank 1 until 1 ms, to rank 2 until 3 ms, again until 4 and 6 ms
	// rank 2: to rank 0 until 3 ms, again until 6 ms
	expect(t, "all-to-all", got,
		[]time.Duration{16 * ms, 13 * ms}, // the last message from rank 2
		[]time.Duration{14 * ms, 11 * ms}, // from rank 0, after 1 ms and 4 ms
		[]time.Duration{16 * ms, 13 * ms}) // from rank 0, after 3 ms and 6 ms
}

// A rank that computes during an all-to-all does not wait for the links again, and a late sender
// delays its receivers.
func TestOverlap(t *testing.T) {
	got := times(t, 2, func(c *Comm, clock *still) error {
		if c.Rank() == 1 {
			clock.now = 100 * ms // rank 1 starts late
		}
		rows := []int64{1000, 1000}
		r, err := c.AllToAllStart(nil, bytes(2000), bytes(2000), rows, rows)
		if err != nil {
			return err
		}
		for _, x := range []struct {
			now  time.Duration
			done bool
		}{{110 * ms, false}, {111*ms - 1, false}, {111 * ms, true}} {
			clock.mu.Lock()
			clock.now = x.now
			clock.mu.Unlock()
			// the copy needs both ranks; its end does not depend on the clock
			for copied := false; !copied; {
				q := r.(*request)
				a, err := q.stamps.(comm.Tester).Test()
				if err != nil {
					return err
				}
				b, err := q.data.(comm.Tester).Test()
				if err != nil {
					return err
				}
				copied = a && b
			}
			done, err := r.(comm.Tester).Test()
			if err != nil {
				return err
			}
			if want := x.done || c.Rank() == 1 && x.now >= 101*ms; done != want {
				t.Errorf("rank %d at %v: complete %v, want %v", c.Rank(), x.now, done, want)
			}
		}
		return r.Wait()
	})
	expect(t, "late sender", got, []time.Duration{111 * ms}, []time.Duration{101 * ms})
}

func TestOtherCalls(t *testing.T) {
	// 4 ranks: a barrier takes two latencies, and an all-reduce of 400 elements sends 2·3/4 of 1600
	// bytes.
	got := times(t, 4, func(c *Comm, _ *still) error {
		if err := c.Barrier(); err != nil {
			return err
		}
		return c.AllReduce(nil, tensor.OfFloat32(make([]float32, 400), 400), comm.Sum)
	})
	for r := range got {
		expect(t, "barrier and all-reduce", got[r:r+1], []time.Duration{20 * ms, 20*ms + 2400*time.Microsecond})
	}
	// A line: rank 0 sends to rank 1, which sends to rank 2.
	got = times(t, 3, func(c *Comm, _ *still) error {
		to, from := c.Rank()+1, c.Rank()-1
		if to == 3 {
			to = -1
		}
		sub, err := c.Split(0, c.Rank()) // shares the link
		if err != nil {
			return err
		}
		for _, x := range []comm.Comm{c, sub} {
			if err := x.SendRecv(nil, bytes(1000), from, bytes(1000), to); err != nil {
				return err
			}
		}
		return sub.Close()
	})
	expect(t, "send-receive", got, []time.Duration{ms, 2 * ms}, []time.Duration{11 * ms, 12 * ms},
		[]time.Duration{11 * ms, 12 * ms})
}

// Messages to other nodes have a link of their own, also in sub-communicators.
func TestNodes(t *testing.T) {
	clocks := make([]still, 4)
	err := comm.RunLocal(4, func(inner comm.Comm) error {
		r := inner.Rank()
		c, err := NewOnNodes(inner, r/2, links, Links{Latency: 100 * ms, Overhead: 2 * ms, Bandwidth: 125e3},
			&clocks[r])
		if err != nil {
			return err
		}
		rows := []int64{1000, 1000, 1000, 1000}
		if err := c.AllToAll(nil, bytes(4000), bytes(4000), rows, rows); err != nil {
			return err
		}
		odd, err := c.Split(r%2, r) // one rank of each node
		if err != nil {
			return err
		}
		if err := odd.AllToAll(nil, bytes(2000), bytes(2000), rows[:2], rows[:2]); err != nil {
			return err
		}
		same, err := c.Split(r/2, r) // the ranks of a node
		if err != nil {
			return err
		}
		return same.Barrier()
	})
	if err != nil {
		t.Fatal(err)
	}
	for r := range clocks {
		// two messages of 10 ms between nodes, of which even ranks get the first; one more, behind
		// them; a barrier inside a node, behind a message of 1 ms
		want := []time.Duration{110 * ms, 130 * ms, 11 * ms}
		if r%2 == 1 {
			want[0] = 120 * ms
		}
		if !slices.Equal(clocks[r].slept, want) {
			t.Errorf("rank %d slept until %v, want %v", r, clocks[r].slept, want)
		}
	}
}

func TestRefusals(t *testing.T) {
	c := comm.Local(1)[0]
	for _, l := range []Links{{-1, 0, 1}, {0, -1, 1}, {}} {
		if _, err := New(c, l, nil); status.Of(err) != status.InvalidArgument {
			t.Errorf("%+v: %v", l, err)
		}
	}
	host, err := comm.NewHost(0, 1, func(in, out []byte) error { copy(out, in); return nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(host, links, nil); status.Of(err) != status.Unsupported {
		t.Error(err)
	}
}
