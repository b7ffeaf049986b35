package cuda

import (
	"sync"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// ncclScratch is the bytes that arrive, from all ranks together, before this rank combines them.
const ncclScratch = 32 << 20

// ncclPoll is how often asynchronous errors are asked for while nothing else does.
const ncclPoll = time.Second

// nccl moves tensors with NCCL, one rank a GPU. Sums over all ranks are NCCL's own, in its order.
// What NCCL has not as it is needed here (uneven rows, sums in BF16 that are rounded once,
// reductions that keep a NaN) is its sends and receives and reductions of our own.
//
// A kernel of NCCL waits on the GPU for its peers, so a peer's death shows as a stream that never
// ends. A goroutine asks for NCCL's asynchronous errors, and for waits that are too long, and ends
// the communicator, which ends the kernel and the wait. What the kernel had not brought is garbage
// then: the failure is told by the next call, and by Close when no other follows.
type nccl struct {
	*commStream
	host    comm.Comm
	scratch device.Buffer
	longs   []int64   // four vectors of size: offsets and bytes, received and sent
	rows    []int64   // two more: shards, and the rows of a piece
	parts   []uintptr // by rank

	mu      sync.Mutex // one call of the library at a time
	library ncclLibrary
	failed  error
	stop    chan struct{}
}

// ncclLibrary is what is used of NCCL, on the communication stream's stream. Offsets and counts are
// in bytes, one for each rank.
type ncclLibrary interface {
	id() ([]byte, error) // of a new communicator, on one rank
	start(ranks, rank int, id []byte) error
	allToAll(dst uintptr, recvAt, recv []int64, src uintptr, sendAt, send []int64) error
	sum(t tensor.Tensor) error // over the ranks, in place
	broadcast(t tensor.Tensor, root int) error
	sendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to int) error
	err() error // asynchronous, since the start; from any goroutine, one at a time
	abort()     // from any goroutine
	close() error
}

func newNCCL(d *Device, host comm.Comm) (transport, error) {
	l, err := newCommStream(d)
	return newNCCLOver(host, l, &realNCCL{l: l}, err)
}

// newNCCLOver takes the error of what came before, because all ranks have to meet.
func newNCCLOver(host comm.Comm, l *commStream, library ncclLibrary, err error) (transport, error) {
	n := host.Size()
	c := &nccl{commStream: l, host: host, library: library, longs: make([]int64, 4*n), rows: make([]int64, 2*n), parts: make([]uintptr, n), stop: make(chan struct{})}
	var id []byte
	if err == nil && host.Rank() == 0 {
		id, err = library.id()
	}
	if agreed := comm.Agree(host, err); agreed != nil {
		if err == nil {
			err = agreed
		}
	} else if id, err = comm.BroadcastBytes(host, id, 0); err == nil {
		err = library.start(n, host.Rank(), id)
	}
	if err != nil {
		if c.commStream != nil {
			c.commStream.close()
		}
		return nil, err // of start, on the rank that it failed on: all meet again behind this
	}
	go c.poll()
	return c, nil
}

func (c *nccl) kind() string { return "nccl" }

// poll looks for asynchronous errors.
func (c *nccl) poll() {
	for {
		select {
		case <-c.stop:
			return
		case <-time.After(ncclPoll):
			c.mu.Lock()
			err := c.sound()
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}
}

// sound asks for asynchronous errors and ends the communicator at the first. The lock is held.
func (c *nccl) sound() error {
	if c.failed == nil {
		if c.failed = c.library.err(); c.failed != nil {
			c.library.abort()
		}
	}
	return c.failed
}

// abort may come while another goroutine is inside NCCL, which then comes back with an error.
func (c *nccl) abort() { c.library.abort() }

func (c *nccl) close() error {
	var err error
	if c.d.open {
		err = c.s.Sync() // with the poll still on: a peer may have ended
	}
	close(c.stop)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil {
		err = c.failed
	}
	if closed := c.library.close(); err == nil {
		err = closed
	}
	c.failed = status.Errorf(status.InvalidArgument, "NCCL: the communicator is closed")
	if c.scratch != nil {
		c.scratch.Free()
		c.scratch = nil
	}
	if closed := c.commStream.close(); err == nil {
		err = closed
	}
	return err
}

// call makes one call of the library while no error is known.
func (c *nccl) call(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.sound(); err != nil {
		return err
	}
	return f()
}

// vectors are the four of an exchange, cleared: where what is received and sent lies, and how much.
func (c *nccl) vectors() (recvAt, recv, sendAt, send []int64) {
	clear(c.longs)
	n := c.host.Size()
	return c.longs[:n], c.longs[n : 2*n], c.longs[2*n : 3*n], c.longs[3*n:]
}

// exchange moves what the vectors say.
func (c *nccl) exchange(dst, src uintptr) error {
	n := c.host.Size()
	return c.call(func() error {
		return c.library.allToAll(dst, c.longs[:n], c.longs[n:2*n], src, c.longs[2*n:3*n], c.longs[3*n:])
	})
}

func (c *nccl) start(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	caller, err := c.enter("AllToAll", s)
	if err != nil {
		return nil, err
	}
	row := max(comm.RowBytes(dst), comm.RowBytes(src))
	recvAt, recv, sendAt, send := c.vectors()
	for j := range recvRows {
		recvAt[j], recv[j] = comm.RowsBefore(recvRows, j)*row, recvRows[j]*row
		sendAt[j], send[j] = comm.RowsBefore(sendRows, j)*row, sendRows[j]*row
	}
	if err := c.exchange(number(dst.Data), number(src.Data)); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	return r, c.s.Record(r.done)
}

func (c *nccl) allReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	if c.host.Size() == 1 || t.Bytes() == 0 {
		return c.nothing("AllReduce", s)
	}
	caller, err := c.enter("AllReduce", s)
	if err != nil {
		return err
	}
	n, x := t.Numel(), number(t.Data)
	if op == comm.Sum && t.DType != tensor.BF16 {
		err = c.call(func() error { return c.library.sum(t) })
	} else { // NCCL's maximum of a number and a NaN is the number, and its sums in BF16 are rounded at every hop
		shards := c.rows[:c.host.Size()]
		for j := range shards {
			lo, hi := comm.Shard(n, len(shards), j)
			shards[j] = hi - lo
		}
		own := x + uintptr(comm.RowsBefore(shards, c.host.Rank())*t.DType.Size())
		if err = c.combineParts(own, x, shards, t.DType.Size(), t.DType, op); err == nil {
			err = c.gather(x, own, shards, t.DType.Size())
		}
	}
	if err != nil {
		return err
	}
	return c.leave(caller)
}

func (c *nccl) allGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("AllGather", s)
	if err != nil {
		return err
	}
	if err := c.gather(number(dst.Data), number(src.Data), rows, comm.RowBytes(dst)); err != nil {
		return err
	}
	return c.leave(caller)
}

// gather brings everyone's block to its place in all; own may be there already.
func (c *nccl) gather(all, own uintptr, rows []int64, unit int64) error {
	me := c.host.Rank()
	if err := c.copy(all+uintptr(comm.RowsBefore(rows, me)*unit), own, rows[me]*unit); err != nil {
		return err
	}
	recvAt, recv, _, send := c.vectors()
	for j := range rows {
		if j != me {
			recvAt[j], recv[j], send[j] = comm.RowsBefore(rows, j)*unit, rows[j]*unit, rows[me]*unit
		}
	}
	return c.exchange(all, own)
}

func (c *nccl) reduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("ReduceScatter", s)
	if err != nil {
		return err
	}
	if err := c.combineParts(number(dst.Data), number(src.Data), rows, comm.RowBytes(src), src.DType, comm.Sum); err != nil {
		return err
	}
	return c.leave(caller)
}

// combineParts leaves in dst this rank's block of src, combined over the ranks in rank order, in
// pieces that all ranks cut alike.
func (c *nccl) combineParts(dst, src uintptr, rows []int64, unit int64, dtype tensor.DType, op comm.Op) error {
	me, n := c.host.Rank(), c.host.Size()
	if unit == 0 {
		return nil
	}
	x := newCut(rows, unit, c.rows[n:], ncclScratch)
	if need := int64(n) * min(x.step, rows[me]) * unit; c.scratch == nil || c.scratch.Bytes() < need {
		if c.scratch != nil {
			c.scratch.Free() // waits for what still uses it
		}
		var err error
		if c.scratch, err = c.d.Alloc(need); err != nil {
			c.scratch = nil
			return err
		}
	}
	in := number(c.scratch.Pointer())
	for k := range x.n {
		x.piece(k)
		now := x.now[me] * unit
		recvAt, recv, sendAt, send := c.vectors()
		for j := range rows {
			c.parts[j] = in + uintptr(int64(j)*now)
			if j == me {
				continue
			}
			recvAt[j], recv[j] = int64(j)*now, now
			sendAt[j], send[j] = (comm.RowsBefore(rows, j)+k*x.step)*unit, x.now[j]*unit
		}
		if err := c.exchange(in, src); err != nil {
			return err
		}
		own := src + uintptr((comm.RowsBefore(rows, me)+k*x.step)*unit)
		if n <= mostCombined {
			c.parts[me] = own
		} else if err := c.copy(c.parts[me], own, now); err != nil { // dst may be own, and is written before the last are read
			return err
		}
		if err := c.combine(dst+uintptr(k*x.step*unit), c.parts, now/dtype.Size(), dtype, op); err != nil {
			return err
		}
	}
	return nil
}

func (c *nccl) broadcast(s device.Stream, t tensor.Tensor, root int) error {
	if c.host.Size() == 1 || t.Bytes() == 0 {
		return c.nothing("Broadcast", s)
	}
	caller, err := c.enter("Broadcast", s)
	if err != nil {
		return err
	}
	if err := c.call(func() error { return c.library.broadcast(t, root) }); err != nil {
		return err
	}
	return c.leave(caller)
}

func (c *nccl) sendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	caller, err := c.enter("SendRecv", s)
	if err != nil {
		return err
	}
	if err := c.call(func() error { return c.library.sendRecv(recv, from, send, to) }); err != nil {
		return err
	}
	return c.leave(caller)
}
