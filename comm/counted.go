package comm

import (
	"time"

	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/internal/trace"
	"ulysses/tensor"
)

// Counted is a Comm that counts bytes and time into a Ledger, charges a clock's phase ("exchange"
// for all-to-all and send-receive, "reduce" for the rest), adds a span to the recorder that the
// clock has, and has each call watched. It serves one goroutine, as its clock does. Any of the
// three may be nil.
type Counted struct {
	inner  Comm
	axis   string
	ledger *Ledger
	clock  *clock.Clock
	watch  *Watch
	seq    *int64 // of the last call
	side   bool
	spare  []*countedRequest
}

// NewCounted wraps c; axis is its name in the ledger: "world", "sequence", "data".
func NewCounted(c Comm, axis string, l *Ledger, clk *clock.Clock, w *Watch) *Counted {
	if inner, ok := c.(*Counted); ok {
		c = inner.inner // counted once
	}
	return &Counted{inner: c, axis: axis, ledger: l, clock: clk, watch: w, seq: new(int64)}
}

// Side is c for the calls on a stream beside the one that computes: the same account, the same
// order of calls, and a track of their own in a trace. It is not closed.
func Side(c Comm) Comm {
	if k, ok := c.(*Counted); ok {
		beside := *k
		beside.side, beside.spare = true, nil
		return &beside
	}
	return c
}

// Inner is the communicator underneath.
func (c *Counted) Inner() Comm { return c.inner }

// Axis is the name in the ledger.
func (c *Counted) Axis() string { return c.axis }

// Sent is the bytes that the operations on the axis of c have sent to other ranks so far; 0 where
// they are not counted.
func Sent(c Comm) (bytes int64) {
	if c, ok := c.(*Counted); ok {
		for _, e := range c.ledger.Entries() {
			if e.Axis == c.axis {
				bytes += e.Bytes
			}
		}
	}
	return bytes
}

// call is one operation between begin and end.
type call struct {
	op      string
	bytes   int64
	control bool
	place   int
	began   time.Time
}

// begin enters a call. One without a stream is between hosts: it settles something, and is counted
// apart as control.
func (c *Counted) begin(op string, s device.Stream, bytes int64) call {
	phase := "reduce"
	if op == OpAllToAll || op == OpSendRecv {
		phase = "exchange"
	}
	c.clock.Push(phase)
	*c.seq++
	return c.watched(op, s == nil, bytes, *c.seq)
}

func (c *Counted) watched(op string, control bool, bytes, seq int64) call {
	return call{op: op, bytes: bytes, control: control, began: time.Now(),
		place: c.watch.begin(flight{op: op, axis: c.axis, rank: c.Rank(), size: c.Size(), seq: seq, bytes: bytes})}
}

// end counts the call, unless it failed, and hands its error on.
func (c *Counted) end(k call, err error) error {
	c.watch.end(k.place)
	c.clock.Pop()
	if err == nil {
		now := time.Now()
		c.span(k, k.op, k.began, now)
		c.ledger.add(line{c.axis, k.op, k.control}, 1, k.bytes, now.Sub(k.began).Seconds())
	}
	return err
}

// span records a call in the track of its stream.
func (c *Counted) span(k call, name string, began, ended time.Time) {
	r := c.clock.Recorder()
	if !r.On() || c.Size() == 1 {
		return
	}
	track := trace.Comm
	switch {
	case k.control:
		track = trace.Control
	case c.side:
		track = trace.CommStream
	}
	r.Add(trace.Span{Track: track, Name: name, Axis: c.axis, Bytes: k.bytes, Peers: c.Size() - 1}, began, ended)
}

func (c *Counted) Rank() int    { return c.inner.Rank() }
func (c *Counted) Size() int    { return c.inner.Size() }
func (c *Counted) Kind() string { return c.inner.Kind() }
func (c *Counted) Close() error { return c.inner.Close() }

func (c *Counted) Abort(code status.Code, reason string) { c.inner.Abort(code, reason) }

// Split makes a Counted of the same axis, ledger, clock and watch.
func (c *Counted) Split(color, key int) (Comm, error) {
	k := c.watched("split", true, 0, *c.seq)
	made, err := c.inner.Split(color, key)
	c.watch.end(k.place)
	if err != nil || made == nil {
		return nil, err
	}
	return NewCounted(made, c.axis, c.ledger, c.clock, c.watch), nil
}

func (c *Counted) Barrier() error {
	k := c.begin(OpBarrier, nil, 0)
	return c.end(k, c.inner.Barrier())
}

func (c *Counted) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	k := c.begin(OpAllToAll, s, c.allToAllBytes(src, sendRows))
	return c.end(k, c.inner.AllToAll(s, dst, src, recvRows, sendRows))
}

// allToAllBytes is zero for counts of the wrong length, which the call refuses.
func (c *Counted) allToAllBytes(src tensor.Tensor, sendRows []int64) int64 {
	if len(sendRows) != c.Size() {
		return 0
	}
	return AllToAllBytes(c.Rank(), sendRows, rowBytes(src))
}

// countedRequest is counted as one call; what is between start and wait belongs to whoever works
// there.
type countedRequest struct {
	c       *Counted
	inner   Request
	bytes   int64
	control bool
	seq     int64
	began   time.Time
	spent   time.Duration // in the start
}

func (c *Counted) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	bytes := c.allToAllBytes(src, sendRows)
	k := c.begin(OpAllToAll, s, bytes)
	inner, err := c.inner.AllToAllStart(s, dst, src, recvRows, sendRows)
	c.watch.end(k.place)
	c.clock.Pop()
	if err != nil {
		return nil, err
	}
	var r *countedRequest
	if n := len(c.spare); n > 0 {
		r, c.spare = c.spare[n-1], c.spare[:n-1]
	} else {
		r = new(countedRequest)
	}
	now := time.Now()
	c.span(k, "all-to-all, start", k.began, now)
	*r = countedRequest{c: c, inner: inner, bytes: bytes, control: k.control, seq: *c.seq, began: k.began, spent: now.Sub(k.began)}
	return r, nil
}

// Wait finishes the exchange. It is called once.
func (r *countedRequest) Wait() error {
	c := r.c
	if r.inner == nil {
		return status.Errorf(status.InvalidArgument, "comm.AllToAll: the request has been waited for already")
	}
	c.clock.Push("exchange")
	k := c.watched(OpAllToAll, r.control, r.bytes, r.seq)
	err := r.inner.Wait()
	r.inner = nil
	c.spare = append(c.spare, r)
	c.watch.end(k.place)
	c.clock.Pop()
	if err == nil {
		now := time.Now()
		k.bytes = 0 // the start has them
		c.span(k, "all-to-all, wait", k.began, now)
		if rec := c.clock.Recorder(); rec.On() && c.Size() > 1 {
			rec.Add(trace.Span{Track: trace.InFlight, Name: OpAllToAll, Axis: c.axis, Bytes: r.bytes, Peers: c.Size() - 1}, r.began, now)
		}
		c.ledger.add(line{c.axis, OpAllToAll, r.control}, 1, r.bytes, (r.spent + now.Sub(k.began)).Seconds())
	}
	return err
}

// Test lets the exchange proceed and reports whether Wait would return at once.
func (r *countedRequest) Test() (bool, error) {
	if t, ok := r.inner.(Tester); ok {
		return t.Test()
	}
	return false, nil
}

func (c *Counted) AllReduce(s device.Stream, t tensor.Tensor, op Op) error {
	k := c.begin(OpAllReduce, s, AllReduceBytes(c.Rank(), c.Size(), t.Numel(), t.DType.Size()))
	return c.end(k, c.inner.AllReduce(s, t, op))
}

func (c *Counted) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	var bytes int64
	if len(rows) == c.Size() {
		bytes = AllGatherBytes(c.Rank(), rows, rowBytes(dst))
	}
	k := c.begin(OpAllGather, s, bytes)
	return c.end(k, c.inner.AllGather(s, dst, src, rows))
}

func (c *Counted) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	var bytes int64
	if len(rows) == c.Size() {
		bytes = ReduceScatterBytes(c.Rank(), rows, rowBytes(src))
	}
	k := c.begin(OpReduceScatter, s, bytes)
	return c.end(k, c.inner.ReduceScatter(s, dst, src, rows))
}

func (c *Counted) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	k := c.begin(OpBroadcast, s, BroadcastSent(c.Rank(), root, c.Size(), t.Bytes()))
	return c.end(k, c.inner.Broadcast(s, t, root))
}

func (c *Counted) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	var bytes int64
	if to >= 0 && to != c.Rank() {
		bytes = send.Bytes()
	}
	k := c.begin(OpSendRecv, s, bytes)
	return c.end(k, c.inner.SendRecv(s, recv, from, send, to))
}

// hostBroadcast hands the bytes to a communicator that has its own way for them.
func (c *Counted) hostBroadcast(data []byte, root int) (done bool, err error) {
	h := broadcaster(c.inner)
	if h == nil {
		return false, nil
	}
	k := c.begin(OpBroadcast, nil, BroadcastSent(c.Rank(), root, c.Size(), int64(len(data))))
	done, err = h.hostBroadcast(data, root)
	return done, c.end(k, err)
}
