package cuda

import (
	"slices"
	"sync"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// ncclScratch is the number of bytes of the blocks of all ranks that arrive before this rank
// combines them. The f32 gradients of a layer of Llama 8B (872 MB) are reduced in 7 chunks. Tests
// lower it.
var ncclScratch = int64(128 << 20)

// scratchBytes returns the scratch of communicators on a stream. The sequence axis reduces no
// gradients.
func (x *sharedStream) scratchBytes() int64 {
	if x.use == forPriority {
		return ncclScratch / 16
	}
	return ncclScratch
}

// ncclPoll is the interval of the queries for asynchronous errors.
const ncclPoll = time.Second

// nccl moves tensors with NCCL, one rank on each GPU. Sums are NCCL's own, in its order, which
// depends on the algorithm that NCCL chooses. NCCL does not support uneven rows, sums in BF16 that
// are rounded once (its kernels round at every addition), or maxima that propagate NaN. For these,
// and for sums of floating-point numbers on deterministic devices, sends and receives of NCCL move
// the blocks and combine reduces them in rank order.
//
// A call allocates no GPU memory. CUDA may delay an allocation until running kernels have finished,
// and NCCL's kernels wait for all ranks: if two ranks of one process allocate between collectives,
// the process hangs (NCCL issue 787). Therefore the constructor allocates the scratch.
//
// A kernel of NCCL waits on the GPU for the other ranks, so after the death of a rank a stream
// never finishes. A goroutine queries NCCL's asynchronous errors and timeouts and, after one,
// aborts the communicator. That ends the kernel and the wait. The data that the kernel should have
// moved is invalid then: the next call returns the error. Without a next call, Close returns it.
type nccl struct {
	*commStream
	host    comm.Comm
	ordered bool // the device of a rank is deterministic: sums are in rank order
	// four vectors of size: offsets and bytes to receive, offsets and bytes to send
	counts []int64
	rows   []int64   // three vectors of size: rows and elements of the shards, elements of a chunk
	blocks []uintptr // by rank

	mu      sync.Mutex // one call of the library at a time
	library ncclLibrary
	failed  error
	stop    chan struct{}
}

// ncclLibrary has the functions of NCCL that are used, on the communication stream. Offsets and
// counts are in bytes, one for each rank.
type ncclLibrary interface {
	id() ([]byte, error) // of a new communicator, on one rank
	start(ranks, rank int, id []byte) error
	allToAll(dst uintptr, recvAt, recv []int64, src uintptr, sendAt, send []int64) error
	allGather(dst, src uintptr, bytes int64) error // bytes of each rank
	allReduce(t tensor.Tensor) error               // sums, in place
	// the sums of this rank's block of src, n elements
	reduceScatter(dst, src uintptr, n int64, dtype tensor.DType) error
	broadcast(t tensor.Tensor, root int) error
	sendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to int) error
	err() error // asynchronous, since the start; from any goroutine, one at a time
	abort()     // from any goroutine
	close() error
}

func newNCCL(d *Device, host comm.Comm, use streamUse) (transport, error) {
	l, err := newCommStream(d, d.ncclUse(use))
	return newNCCLOver(host, l, &realNCCL{l: l}, d.deterministic, err)
}

// newNCCLOver makes a transport over a library. Sums are in rank order if `ordered` is true on a
// rank. err is the error of this rank's earlier steps; all ranks call newNCCLOver to agree on it.
// Collective over host.
func newNCCLOver(host comm.Comm, l *commStream, library ncclLibrary, ordered bool, err error) (transport, error) {
	n := host.Size()
	c := &nccl{commStream: l, host: host, library: library, counts: make([]int64, 4*n), rows: make([]int64, 3*n),
		blocks: make([]uintptr, n), stop: make(chan struct{})}
	var id []byte
	if err == nil && n > 1 {
		err = l.allocateScratch(l.shared.scratchBytes())
	}
	if err == nil && host.Rank() == 0 {
		id, err = library.id()
	}
	agreed := comm.Agree(host, err)
	if agreed == nil {
		if id, err = comm.BroadcastBytes(host, id, 0); err == nil {
			if c.ordered, err = anyRank(host, ordered); err == nil {
				err = library.start(n, host.Rank(), id)
			}
		}
	}
	if agreed != nil || err != nil {
		if c.commStream != nil {
			c.commStream.close()
		}
		return nil, err // possibly the error of one rank only; newComm agrees on it
	}
	go c.poll()
	return c, nil
}

// anyRank reports whether x is true on a rank. Collective.
func anyRank(host comm.Comm, x bool) (bool, error) {
	var own []byte
	if x {
		own = []byte{1}
	}
	all, err := comm.GatherBytes(host, own)
	return slices.ContainsFunc(all, func(b []byte) bool { return len(b) > 0 }), err
}

func (c *nccl) kind() string { return "nccl" }

// poll queries asynchronous errors until close or the first error.
func (c *nccl) poll() {
	for {
		select {
		case <-c.stop:
			return
		case <-time.After(ncclPoll):
			c.mu.Lock()
			err := c.checkAsync()
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}
}

// checkAsync queries asynchronous errors and aborts the communicator after the first one. The
// caller holds the lock.
func (c *nccl) checkAsync() error {
	if c.failed == nil {
		if c.failed = c.library.err(); c.failed != nil {
			c.library.abort()
		}
	}
	return c.failed
}

// abort may be called while another goroutine is in a call of NCCL; that call then returns an
// error.
func (c *nccl) abort() { c.library.abort() }

func (c *nccl) close() error {
	var err error
	if c.d.open {
		err = c.s.Sync() // poll still runs, in case another rank has ended
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
	if closed := c.commStream.close(); err == nil {
		err = closed
	}
	return err
}

// call makes one call of the library, unless an error has occurred.
func (c *nccl) call(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.checkAsync(); err != nil {
		return err
	}
	return f()
}

// vectors returns the four vectors of an all-to-all, set to 0: offsets and bytes to receive,
// offsets and bytes to send.
func (c *nccl) vectors() (recvAt, recv, sendAt, send []int64) {
	clear(c.counts)
	n := c.host.Size()
	return c.counts[:n], c.counts[n : 2*n], c.counts[2*n : 3*n], c.counts[3*n:]
}

// allToAll moves the blocks that the vectors describe.
func (c *nccl) allToAll(dst, src uintptr) error {
	n := c.host.Size()
	return c.call(func() error {
		return c.library.allToAll(dst, c.counts[:n], c.counts[n:2*n], src, c.counts[2*n:3*n], c.counts[3*n:])
	})
}

func (c *nccl) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
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
	if err := c.allToAll(address(dst.Data), address(src.Data)); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	return r, c.s.Record(r.done)
}

func (c *nccl) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	if c.host.Size() == 1 || t.Bytes() == 0 {
		return c.empty("AllReduce", s)
	}
	caller, err := c.enter("AllReduce", s)
	if err != nil {
		return err
	}
	n, x := t.Numel(), address(t.Data)
	if c.sums(t.DType, op) {
		err = c.call(func() error { return c.library.allReduce(t) })
	} else {
		shards := c.rows[:c.host.Size()]
		for j := range shards {
			lo, hi := comm.Shard(n, len(shards), j)
			shards[j] = hi - lo
		}
		own := x + uintptr(comm.RowsBefore(shards, c.host.Rank())*t.DType.Size())
		if err = c.reduceShards(own, x, shards, t.DType.Size(), t.DType, op); err == nil {
			err = c.gather(x, own, shards, t.DType.Size())
		}
	}
	if err != nil {
		return err
	}
	return c.leave(caller)
}

// sums reports whether NCCL's own reduction is used. NCCL's maximum of a number and a NaN is the
// number, and it rounds sums in BF16 at every addition. Sums of integers have no order.
func (c *nccl) sums(dtype tensor.DType, op comm.Op) bool {
	switch {
	case op != comm.Sum || dtype == tensor.BF16:
		return false
	case dtype == tensor.I32 || dtype == tensor.I64:
		return true
	}
	return !c.ordered
}

// even reports whether all ranks have equally many rows, and several ranks have some.
func even(rows []int64) bool {
	return len(rows) > 1 && rows[0] > 0 && !slices.ContainsFunc(rows, func(n int64) bool { return n != rows[0] })
}

func (c *nccl) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("AllGather", s)
	if err != nil {
		return err
	}
	if err := c.gather(address(dst.Data), address(src.Data), rows, comm.RowBytes(dst)); err != nil {
		return err
	}
	return c.leave(caller)
}

// gather copies the blocks of all ranks to all. own may be this rank's block of all.
func (c *nccl) gather(all, own uintptr, rows []int64, unit int64) error {
	me := c.host.Rank()
	if even(rows) {
		return c.call(func() error { return c.library.allGather(all, own, rows[me]*unit) })
	}
	if err := c.copy(all+uintptr(comm.RowsBefore(rows, me)*unit), own, rows[me]*unit); err != nil {
		return err
	}
	recvAt, recv, _, send := c.vectors()
	for j := range rows {
		if j != me {
			recvAt[j], recv[j], send[j] = comm.RowsBefore(rows, j)*unit, rows[j]*unit, rows[me]*unit
		}
	}
	return c.allToAll(all, own)
}

func (c *nccl) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	caller, err := c.enter("ReduceScatter", s)
	if err != nil {
		return err
	}
	to, from, row := address(dst.Data), address(src.Data), comm.RowBytes(src)
	if c.sums(src.DType, comm.Sum) && even(rows) {
		err = c.call(func() error { return c.library.reduceScatter(to, from, rows[0]*row/src.DType.Size(), src.DType) })
	} else {
		err = c.reduceShards(to, from, rows, row, src.DType, comm.Sum)
	}
	if err != nil {
		return err
	}
	return c.leave(caller)
}

// reduceShards writes this rank's block of src, combined over the ranks in rank order, to dst. It
// runs in chunks, which are the same on all ranks.
func (c *nccl) reduceShards(dst, src uintptr, rows []int64, unit int64, dtype tensor.DType, op comm.Op) error {
	me, n := c.host.Rank(), c.host.Size()
	if n == 1 {
		return c.copy(dst, src, rows[me]*unit)
	}
	shards, elem := c.rows[n:2*n], dtype.Size() // in elements, because a row may exceed the scratch
	for j := range rows {
		shards[j] = rows[j] * (unit / elem)
	}
	scratch := c.shared.scratch
	block := scratch.Bytes() / int64(n) / align * align
	x := newChunks(shards, elem, c.rows[2*n:], block*int64(n))
	in := address(scratch.Pointer())
	for k := range x.n {
		x.selectChunk(k)
		now := x.current[me] * elem
		recvAt, recv, sendAt, send := c.vectors()
		for j := range shards {
			c.blocks[j] = in + uintptr(int64(j)*now)
			if j == me {
				continue
			}
			recvAt[j], recv[j] = int64(j)*now, now
			sendAt[j], send[j] = (comm.RowsBefore(shards, j)+k*x.step)*elem, x.current[j]*elem
		}
		if err := c.allToAll(in, src); err != nil {
			return err
		}
		own := src + uintptr((comm.RowsBefore(shards, me)+k*x.step)*elem)
		if n <= maxCombined {
			c.blocks[me] = own
		} else if err := c.copy(c.blocks[me], own, now); err != nil {
			// the copy is needed because dst may be own, and is written before all blocks are read
			return err
		}
		if err := c.combine(dst+uintptr(k*x.step*elem), c.blocks, x.current[me], dtype, op); err != nil {
			return err
		}
	}
	return nil
}

func (c *nccl) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	if c.host.Size() == 1 || t.Bytes() == 0 {
		return c.empty("Broadcast", s)
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

func (c *nccl) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	caller, err := c.enter("SendRecv", s)
	if err != nil {
		return err
	}
	if err := c.call(func() error { return c.library.sendRecv(recv, from, send, to) }); err != nil {
		return err
	}
	return c.leave(caller)
}
