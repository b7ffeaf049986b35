// Package slowlinks slows the communicators of goroutine ranks down to links with a given latency
// and bandwidth. Tests and benchmarks use it to see, on one machine, what overlapping communication
// with computation gains on a network.
//
// New wraps the communicator of each rank. A rank has one link for what it sends; its messages
// follow one another there. With NewOnNodes it has a second link, for messages to other nodes. A
// message of n bytes occupies the link for Overhead + n/Bandwidth, and arrives Latency after that.
// Receiving has no limit, and a rank's message to itself takes no time. A call returns when the
// messages for this rank have arrived and its own have left. Reductions, gathers, broadcasts and
// barriers begin when the last rank has started them; see the method ring.
//
// Data moves at once in the wrapped communicator, and a call then sleeps until the messages would
// have arrived. So a rank that computes between AllToAllStart and Wait uses the time of the links.
package slowlinks

import (
	"math/bits"
	"sync"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Links describes the link of a rank.
type Links struct {
	Latency   time.Duration // between the last byte's departure and its arrival
	Overhead  time.Duration // for which each message occupies the link, in addition to its bytes
	Bandwidth float64       // bytes a second
}

// Clock is the time of all ranks. A nil Clock is the clock of the system.
type Clock interface {
	Now() time.Duration // since any fixed point in time
	SleepUntil(t time.Duration)
}

var epoch = time.Now()

type systemClock struct{}

func (systemClock) Now() time.Duration { return time.Since(epoch) }

func (systemClock) SleepUntil(t time.Duration) {
	for left := t - time.Since(epoch); left > 0; left = t - time.Since(epoch) {
		sleep(left)
	}
}

// Comm is a communicator with slow links.
type Comm struct {
	comm.Comm           // moves the data
	stamps    comm.Comm // moves the times at which messages arrive
	ones      []int64
	links     [2]Links // inside a node and between nodes
	clock     Clock
	out       *[2]link
	node      int
	nodeOf    []int64 // by rank
	several   bool    // the ranks are on several nodes
}

const (
	inside  = 0
	between = 1
)

// link is the link of a rank, which its communicators share.
type link struct {
	mu   sync.Mutex
	free time.Duration // when the last byte leaves
}

// New wraps a communicator of kind "local". All ranks give the same links and clock. Close closes
// the wrapped communicator. Collective.
func New(c comm.Comm, links Links, clock Clock) (*Comm, error) {
	return NewOnNodes(c, 0, links, links, clock)
}

// NewOnNodes wraps a communicator whose ranks are on several nodes. node is the node of this rank.
// Messages between nodes use links of their own. Collective.
func NewOnNodes(c comm.Comm, node int, within, across Links, clock Clock) (*Comm, error) {
	for _, links := range []Links{within, across} {
		if !(links.Bandwidth > 0) || links.Latency < 0 || links.Overhead < 0 {
			return nil, status.Errorf(status.InvalidArgument,
				"slowlinks.New: latency %v, overhead %v and bandwidth %v; give 0 or more, 0 or more, and more than 0",
				links.Latency, links.Overhead, links.Bandwidth)
		}
	}
	if c.Kind() != "local" {
		return nil, status.Errorf(status.Unsupported,
			"slowlinks.New: a communicator of kind %q; the clocks of its ranks differ, so use goroutine ranks (comm.RunLocal)",
			c.Kind())
	}
	if clock == nil {
		clock = systemClock{}
	}
	return wrap(c, &Comm{links: [2]Links{within, across}, clock: clock, out: &[2]link{}, node: node})
}

// wrap returns c with the links of a communicator of the same rank.
func wrap(c comm.Comm, like *Comm) (*Comm, error) {
	stamps, err := c.Split(0, c.Rank())
	if err != nil {
		return nil, err
	}
	ones := make([]int64, c.Size())
	for j := range ones {
		ones[j] = 1
	}
	nodeOf, several := make([]int64, c.Size()), false
	if err := stamps.AllGather(nil, tensor.OfInt64(nodeOf, int64(c.Size())),
		tensor.OfInt64([]int64{int64(like.node)}, 1), ones); err != nil {
		return nil, err
	}
	for _, node := range nodeOf {
		several = several || node != nodeOf[0]
	}
	return &Comm{Comm: c, stamps: stamps, ones: ones, links: like.links, clock: like.clock, out: like.out,
		node: like.node, nodeOf: nodeOf, several: several}, nil
}

// time returns how long a message occupies a link.
func (l Links) time(bytes int64) time.Duration {
	return l.Overhead + time.Duration(float64(bytes)/l.Bandwidth*1e9)
}

// send occupies a link for a message and returns when the last byte leaves.
func (c *Comm) send(bytes int64, level int) time.Duration {
	out := &c.out[level]
	out.mu.Lock()
	defer out.mu.Unlock()
	out.free = max(out.free, c.clock.Now()) + c.links[level].time(bytes)
	return out.free
}

// level returns the link to a rank.
func (c *Comm) level(rank int) int {
	if c.nodeOf[rank] != int64(c.node) {
		return between
	}
	return inside
}

func (c *Comm) Split(color, key int) (comm.Comm, error) {
	sub, err := c.Comm.Split(color, key)
	if err != nil || sub == nil {
		return nil, err
	}
	return wrap(sub, c)
}

// Waited returns the time in which calls have waited until other ranks had started them. The time
// of the links is not part of it.
func (c *Comm) Waited() time.Duration {
	return c.Comm.(comm.Waiter).Waited() + c.stamps.(comm.Waiter).Waited()
}

func (c *Comm) Close() error {
	first := c.stamps.Close()
	if err := c.Comm.Close(); first == nil {
		first = err
	}
	return first
}

// request is an all-to-all in progress.
type request struct {
	c            *Comm
	data, stamps comm.Request
	recv         []int64       // by rank: when its message arrives here, in nanoseconds; 0 = no message
	sent         time.Duration // when the last byte of this rank's messages leaves
	keep         []int64       // the times that this rank sends
	waited       bool
}

func (c *Comm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	r, err := c.AllToAllStart(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	return r.Wait()
}

func (c *Comm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
	if s != nil {
		if err := s.Sync(); err != nil { // the messages leave when the data is ready
			return nil, err
		}
	}
	data, err := c.Comm.AllToAllStart(s, dst, src, recvRows, sendRows)
	if err != nil {
		return nil, err
	}
	n := c.Size()
	r := &request{c: c, data: data, recv: make([]int64, n), keep: make([]int64, n)}
	for k := 1; k < n; k++ { // ranks start with different peers
		j := (c.Rank() + k) % n
		if bytes := sendRows[j] * comm.RowBytes(src); bytes > 0 {
			level := c.level(j)
			left := c.send(bytes, level)
			r.sent = max(r.sent, left)
			r.keep[j] = int64(left + c.links[level].Latency)
		}
	}
	r.stamps, err = c.stamps.AllToAllStart(nil, tensor.OfInt64(r.recv, int64(n)), tensor.OfInt64(r.keep, int64(n)),
		c.ones, c.ones)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// due returns when the all-to-all is complete on this rank. The times have been received.
func (r *request) due() time.Duration {
	due := r.sent
	for _, at := range r.recv {
		due = max(due, time.Duration(at))
	}
	return due
}

func (r *request) Wait() error {
	if r.waited {
		return comm.ErrWaited()
	}
	r.waited = true
	for _, q := range []comm.Request{r.stamps, r.data} {
		if err := q.Wait(); err != nil {
			return err
		}
	}
	r.c.clock.SleepUntil(r.due())
	return nil
}

// Test makes progress and reports whether Wait would return at once.
func (r *request) Test() (bool, error) {
	if r.waited {
		return true, nil
	}
	for _, q := range []comm.Request{r.stamps, r.data} {
		if done, err := q.(comm.Tester).Test(); !done || err != nil {
			return false, err
		}
	}
	return r.c.clock.Now() >= r.due(), nil
}

// ring sleeps for the time of a collective that sends bytes from this rank: from the start on the
// last rank, ⌈log2 P⌉ latencies and the time of the bytes on the link; on several nodes, on the
// link between nodes.
func (c *Comm) ring(bytes int64) error {
	n := c.Size()
	if n == 1 {
		return nil
	}
	all := make([]int64, n)
	if err := c.stamps.AllGather(nil, tensor.OfInt64(all, int64(n)), tensor.OfInt64([]int64{int64(c.clock.Now())}, 1),
		c.ones); err != nil {
		return err
	}
	level := inside
	if c.several {
		level = between
	}
	due := c.send(bytes, level)
	latency := c.links[level].Latency * time.Duration(bits.Len(uint(n-1)))
	for _, began := range all {
		due = max(due, time.Duration(began)+c.links[level].time(bytes))
	}
	c.clock.SleepUntil(due + latency)
	return nil
}

// then runs a collective, which has moved its data, at the speed of the links.
func (c *Comm) then(err error, bytes int64) error {
	if err != nil {
		return err
	}
	return c.ring(bytes)
}

func (c *Comm) Barrier() error { return c.then(c.Comm.Barrier(), 0) }

func (c *Comm) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	return c.then(c.Comm.AllReduce(s, t, op), comm.AllReduceBytes(c.Rank(), c.Size(), t.Numel(), t.DType.Size()))
}

func (c *Comm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	err := c.Comm.AllGather(s, dst, src, rows)
	if err != nil {
		return err
	}
	return c.ring(comm.AllGatherBytes(c.Rank(), rows, comm.RowBytes(dst)))
}

func (c *Comm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	err := c.Comm.ReduceScatter(s, dst, src, rows)
	if err != nil {
		return err
	}
	return c.ring(comm.ReduceScatterBytes(c.Rank(), rows, comm.RowBytes(src)))
}

func (c *Comm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	err := c.Comm.Broadcast(s, t, root)
	if err != nil {
		return err
	}
	return c.ring(comm.BroadcastSent(c.Rank(), root, c.Size(), t.Bytes()))
}

func (c *Comm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	if s != nil {
		if err := s.Sync(); err != nil {
			return err
		}
	}
	// The peers check the arguments before the times move.
	if err := comm.CheckSendRecv(recv, from, send, to, c.Size()); err != nil {
		return err
	}
	var due time.Duration
	arrives, out := []int64{0}, []int64{0}
	if to >= 0 && to != c.Rank() && send.Bytes() > 0 {
		due = c.send(send.Bytes(), c.level(to))
		out[0] = int64(due + c.links[c.level(to)].Latency)
	}
	if err := c.stamps.SendRecv(nil, tensor.OfInt64(arrives, 1), from, tensor.OfInt64(out, 1), to); err != nil {
		return err
	}
	if err := c.Comm.SendRecv(s, recv, from, send, to); err != nil {
		return err
	}
	if from >= 0 {
		due = max(due, time.Duration(arrives[0]))
	}
	c.clock.SleepUntil(due)
	return nil
}
