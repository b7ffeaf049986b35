package comm

import (
	"time"

	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/flight"
	"ulysses/internal/status"
	"ulysses/internal/trace"
	"ulysses/tensor"
)

// Counted wraps a Comm. For each call it adds bytes and seconds to a Ledger, charges a phase of a
// clock ("exchange" for all-to-all and send-receive, "reduce" for the rest), adds a span to the
// clock's trace recorder, and registers the call with a Watch. If the wrapped communicator is a
// Waiter, ledger and clock also get the seconds of a call in which this rank waited for its peers.
// Ledger, clock and watch may be nil. It serves one goroutine, as its clock does.
type Counted struct {
	inner      Comm
	waiter     Waiter // inner; nil if it does not measure
	axis       string
	group      flight.Group // the ranks of the world that c has, if this is known
	ledger     *Ledger
	clock      *clock.Clock
	watch      *Watch
	seq        *int64        // sequence number of the last call of all ranks
	messages   map[int]int64 // numbers of the last messages from and to each other rank
	commStream bool          // calls are on a communication stream
	spare      freeList[countedRequest]
}

// NewCounted wraps c. axis is the name of the communicator in the ledger: "world", "sequence" or
// "data". It is not collective.
func NewCounted(c Comm, axis string, l *Ledger, clk *clock.Clock, w *Watch) *Counted {
	if inner, ok := c.(*Counted); ok {
		c = inner.inner // do not count twice
	}
	waiter, _ := c.(Waiter)
	return &Counted{inner: c, waiter: waiter, axis: axis, group: flight.Group{Axis: axis, Stride: 1, Size: c.Size()},
		ledger: l, clock: clk, watch: w, seq: new(int64), messages: map[int]int64{}}
}

// OnCommStream returns c for calls on a communication stream instead of the compute stream. The
// calls use the ledger and the sequence numbers of c and have their own track in a trace. Close c,
// not the result.
func OnCommStream(c Comm) Comm {
	if k, ok := c.(*Counted); ok {
		other := *k
		other.commStream, other.spare = true, nil
		return &other
	}
	return c
}

// spans says which ranks of the world c has: first, first + stride, …
func (c *Counted) spans(first, stride int) *Counted {
	c.group.First, c.group.Stride = first, stride
	return c
}

// Inner returns the wrapped communicator.
func (c *Counted) Inner() Comm { return c.inner }

// Axis returns the name of the communicator in the ledger.
func (c *Counted) Axis() string { return c.axis }

// BytesSent returns the bytes that this rank has sent to other ranks on the axis of c, and 0 if c
// does not count.
func BytesSent(c Comm) (bytes int64) {
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
	control bool // without a stream: values that ranks agree on, in host memory
	slot    int  // in the watch
	began   time.Time
	waited  time.Duration // of the communicator, when the call began
}

// Waited returns the time in which the calls of c have waited for other ranks. It is 0 if the
// wrapped communicator does not measure it.
func (c *Counted) Waited() time.Duration {
	if c.waiter == nil {
		return 0
	}
	return c.waiter.Waited()
}

// begin records the start of a call. A call without a stream is counted separately, as control.
func (c *Counted) begin(op string, s device.Stream, bytes int64) call {
	phase := "reduce"
	if op == OpAllToAll || op == OpSendRecv {
		phase = "exchange"
	}
	c.clock.Push(phase)
	*c.seq++
	return c.watched(op, s == nil, bytes, *c.seq, 0)
}

// beginAlike is begin for a call in which values must be equal on all ranks of the communicator.
func (c *Counted) beginAlike(op string, s device.Stream, bytes int64, t tensor.Tensor, values ...int64) call {
	c.clock.Push("reduce")
	*c.seq++
	return c.watched(op, s == nil, bytes, *c.seq, flight.Checksum(int64(t.DType), values))
}

// watched registers a call. checksum is of what must be equal on all ranks; 0 = nothing.
func (c *Counted) watched(op string, control bool, bytes, seq int64, checksum uint8) call {
	return c.register(activeCall{op: op, rank: c.Rank(), seq: seq, bytes: bytes, group: c.group, control: control,
		checksum: checksum})
}

func (c *Counted) register(a activeCall) call {
	return call{op: a.op, bytes: a.bytes, control: a.control, began: time.Now(), waited: c.Waited(),
		slot: c.watch.begin(a)}
}

// beginMessage is begin for SendRecv. Only the two ranks of a message call SendRecv, so messages
// are numbered for each pair of ranks: a number of the group must stand for the same call on all
// its ranks, otherwise flight.Diagnose names a rank that has done nothing wrong.
func (c *Counted) beginMessage(s device.Stream, bytes int64, from, to int) call {
	peer := c.peer(from, to)
	if peer < 0 {
		return c.begin(OpSendRecv, s, bytes)
	}
	c.clock.Push("exchange")
	c.messages[peer]++
	first, distance, at := c.Rank(), peer-c.Rank(), 0
	if distance < 0 {
		first, distance, at = peer, -distance, 1
	}
	pair := flight.Group{Axis: c.axis, First: c.group.World(first), Stride: distance * c.group.Stride, Size: 2}
	return c.register(activeCall{op: OpSendRecv, rank: at, seq: c.messages[peer], bytes: bytes, group: pair,
		control: s == nil})
}

// peer returns the other rank of a message between two ranks, and -1 if all ranks call SendRecv: in
// a ring of messages, with Kind "host", and in a group of two, whose numbers both ranks have.
func (c *Counted) peer(from, to int) int {
	one := from < 0 || to < 0 || from == to
	if p := max(from, to); one && p != c.Rank() && p < c.Size() && c.Size() > 2 && c.Kind() != "host" {
		return p
	}
	return -1
}

// end records the end of a call and returns err. A call that failed is not counted.
func (c *Counted) end(k call, err error) error {
	waited := c.leave(k)
	if err == nil {
		now := time.Now()
		c.span(k, k.op, k.began, now)
		c.ledger.add(line{c.axis, k.op, k.control}, 1, k.bytes, now.Sub(k.began).Seconds(), waited.Seconds())
	}
	return c.inWorld(err)
}

// leave ends the phase of a call and returns how long the call has waited for other ranks.
func (c *Counted) leave(k call) time.Duration {
	waited := c.Waited() - k.waited
	c.watch.end(k.slot)
	c.clock.Waited(waited)
	c.clock.Pop()
	return waited
}

// span records a call in the trace, in the track of its stream.
func (c *Counted) span(k call, name string, began, ended time.Time) {
	r := c.clock.Recorder()
	if !r.On() || c.Size() == 1 {
		return
	}
	track := trace.Comm
	switch {
	case k.control:
		track = trace.Control
	case c.commStream:
		track = trace.CommStream
	}
	r.Add(trace.Span{Track: track, Name: name, Axis: c.axis, Bytes: k.bytes, Peers: c.Size() - 1}, began, ended)
}

func (c *Counted) Rank() int    { return c.inner.Rank() }
func (c *Counted) Size() int    { return c.inner.Size() }
func (c *Counted) Kind() string { return c.inner.Kind() }
func (c *Counted) Close() error { return c.inner.Close() }

func (c *Counted) Abort(code status.Code, reason string) { c.inner.Abort(code, reason) }

// Split returns a Counted with the same axis, ledger, clock and watch. Collective.
func (c *Counted) Split(color, key int) (Comm, error) { return c.split(color, key, Comm.Split) }

// SplitPriority is the function SplitPriority.
func (c *Counted) SplitPriority(color, key int) (Comm, error) {
	return c.split(color, key, SplitPriority)
}

func (c *Counted) split(color, key int, split func(c Comm, color, key int) (Comm, error)) (Comm, error) {
	*c.seq++
	k := c.watched("split", true, 0, *c.seq, 0)
	made, err := split(c.inner, color, key)
	c.watch.end(k.slot)
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

// allToAllBytes returns the bytes to send, and 0 if sendRows has the wrong length; the call then
// returns an error.
func (c *Counted) allToAllBytes(src tensor.Tensor, sendRows []int64) int64 {
	if len(sendRows) != c.Size() {
		return 0
	}
	return AllToAllBytes(c.Rank(), sendRows, rowBytes(src))
}

// countedRequest is an all-to-all that is counted as one call. Its seconds are the sum of the
// time in AllToAllStart and the time in Wait.
type countedRequest struct {
	c       *Counted
	inner   Request // nil after Wait
	bytes   int64
	control bool
	seq     int64
	began   time.Time
	spent   time.Duration // in AllToAllStart
	waited  time.Duration // in AllToAllStart, for other ranks
}

func (c *Counted) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	bytes := c.allToAllBytes(src, sendRows)
	k := c.begin(OpAllToAll, s, bytes)
	inner, err := c.inner.AllToAllStart(s, dst, src, recvRows, sendRows)
	waited := c.leave(k)
	if err != nil {
		return nil, c.inWorld(err)
	}
	r, now := c.spare.get(), time.Now()
	c.span(k, "all-to-all, start", k.began, now)
	*r = countedRequest{c: c, inner: inner, bytes: bytes, control: k.control, seq: *c.seq, began: k.began,
		spent: now.Sub(k.began), waited: waited}
	return r, nil
}

// Wait waits until the all-to-all is complete.
func (r *countedRequest) Wait() error {
	c := r.c
	if r.inner == nil {
		return ErrWaited()
	}
	c.clock.Push("exchange")
	k := c.watched(OpAllToAll, r.control, r.bytes, r.seq, 0)
	err := r.inner.Wait()
	r.inner = nil
	c.spare.put(r)
	waited := r.waited + c.leave(k)
	if err == nil {
		now := time.Now()
		k.bytes = 0 // counted in the span of the start
		c.span(k, "all-to-all, wait", k.began, now)
		if rec := c.clock.Recorder(); rec.On() && c.Size() > 1 {
			rec.Add(trace.Span{Track: trace.InFlight, Name: OpAllToAll, Axis: c.axis, Bytes: r.bytes,
				Peers: c.Size() - 1}, r.began, now)
		}
		c.ledger.add(line{c.axis, OpAllToAll, r.control}, 1, r.bytes, (r.spent + now.Sub(k.began)).Seconds(),
			waited.Seconds())
	}
	return c.inWorld(err)
}

// Test makes progress and reports whether Wait would return at once.
func (r *countedRequest) Test() (bool, error) {
	if t, ok := r.inner.(Tester); ok {
		return t.Test()
	}
	return false, nil
}

func (c *Counted) AllReduce(s device.Stream, t tensor.Tensor, op Op) error {
	k := c.beginAlike(OpAllReduce, s, AllReduceBytes(c.Rank(), c.Size(), t.Numel(), t.DType.Size()), t, t.Numel(),
		int64(op))
	return c.end(k, c.inner.AllReduce(s, t, op))
}

func (c *Counted) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	var bytes int64
	if len(rows) == c.Size() {
		bytes = AllGatherBytes(c.Rank(), rows, rowBytes(dst))
	}
	k := c.beginAlike(OpAllGather, s, bytes, dst, rows...)
	return c.end(k, c.inner.AllGather(s, dst, src, rows))
}

func (c *Counted) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	var bytes int64
	if len(rows) == c.Size() {
		bytes = ReduceScatterBytes(c.Rank(), rows, rowBytes(src))
	}
	k := c.beginAlike(OpReduceScatter, s, bytes, src, rows...)
	return c.end(k, c.inner.ReduceScatter(s, dst, src, rows))
}

func (c *Counted) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	k := c.beginAlike(OpBroadcast, s, BroadcastSent(c.Rank(), root, c.Size(), t.Bytes()), t, t.Numel(), int64(root))
	return c.end(k, c.inner.Broadcast(s, t, root))
}

func (c *Counted) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	var bytes int64
	if to >= 0 && to != c.Rank() {
		bytes = send.Bytes()
	}
	k := c.beginMessage(s, bytes, from, to)
	return c.end(k, c.inner.SendRecv(s, recv, from, send, to))
}

// broadcastBytes counts the broadcast of the wrapped communicator, if it is a byteBroadcaster.
func (c *Counted) broadcastBytes(data []byte, root int) (done bool, err error) {
	h := findBroadcaster(c.inner)
	if h == nil {
		return false, nil
	}
	k := c.begin(OpBroadcast, nil, BroadcastSent(c.Rank(), root, c.Size(), int64(len(data))))
	if done, err = h.broadcastBytes(data, root); !done && err == nil { // the caller broadcasts in another way
		c.leave(k)
		return false, nil
	}
	return done, c.end(k, err)
}
