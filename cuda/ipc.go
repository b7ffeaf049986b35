package cuda

// #include "bridge.h"
import "C"

import (
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// smallReduce is the limit in bytes up to which each rank combines the whole tensor. That needs one
// barrier less than combining a shard on each rank.
const smallReduce = 64 << 10

// ipcScratch is the number of bytes of the scratch. CUDA places smaller allocations together in
// blocks of 2 MiB, and a handle then shares the whole block.
const ipcScratch = 2 << 20

// ipc moves tensors between GPUs that can read each other's memory, or on one GPU that several
// ranks share. Goroutine ranks use plain addresses, processes of a node use CUDA IPC.
//
// Ranks pull: each rank reads from other ranks and writes only its own memory, so a faulty rank
// cannot overwrite the memory of others. A call has two collectives on the host's communicator. The
// first (begin) exchanges packets, which say where each rank's tensor is and that its event "ready"
// is recorded behind the work of the caller's stream. Before the second (finishReads), each rank
// has enqueued its copies and recorded "done". All communication streams then wait for all "done"
// events. Therefore no rank reads a tensor after the call that was given it. Hosts wait for hosts
// and not for a GPU, and no GPU waits in a loop.
//
// A rank records "ready" again only when all ranks have passed the second collective of the last
// call, so they have enqueued their waits for it. It records "done" again only when all ranks have
// begun the next call. ipcEvents also covers waits that are still pending on a GPU.
type ipc struct {
	*commStream
	ipcEvents
	host     comm.Comm
	me       int
	peers    []peer
	pairs    []pairEvents // by rank: this rank has read messages from that rank (SendRecv)
	receipts []byte       // of SendRecv: the one to send, the one received
	maps     *mappings
	mapped   map[mapping]*mapped
	own      packet
	all      []byte // the packets of all ranks
	// three vectors of size: bytes of a packet; bytes to receive and to send in an all-to-all
	bytes   []int64
	addrs   []uintptr     // by rank: the address of its tensor in this process
	scratch device.Buffer // of small reductions
	group   *group
}

func (c *ipc) kind() string { return "ipc" }
func (c *ipc) abort()       {}

// begin starts a call: it orders the call behind the work of the caller's stream and exchanges
// packets. t is the tensor that other ranks read. Afterwards the communication stream waits for the
// tensors of all ranks, c.addrs has their addresses, and packetOf(j) is the packet of rank j.
func (c *ipc) begin(s device.Stream, h header, t tensor.Tensor, recvRows, sendRows []int64) (*stream, error) {
	c.group.enter()
	caller, err := c.announce(h.name(), s)
	if err != nil {
		return nil, err
	}
	c.own.write(h, c.readyIndex, recvRows, sendRows)
	packErr := c.writeLocation(t)
	if packErr != nil {
		c.own.fail()
	}
	if err := c.host.AllGather(nil, bytesOf(c.all), bytesOf(c.own.raw), c.bytes[:len(c.peers)]); err != nil {
		return nil, c.group.hostFailed(err)
	}
	if packErr != nil {
		return nil, packErr
	}
	for j := range c.peers {
		if err := c.checkPacket(j); err != nil {
			return nil, err
		}
	}
	for j := range c.peers {
		if j == c.me {
			c.addrs[j] = address(t.Data)
			continue
		}
		if err := c.waitReady(j, c.packetOf(j)); err != nil {
			return nil, err
		}
		if c.addrs[j], err = c.addressOf(j, c.packetOf(j)); err != nil {
			return nil, err
		}
	}
	return caller, nil
}

// announce orders the call behind the work of the caller's stream and records "ready".
func (c *ipc) announce(op string, s device.Stream) (*stream, error) {
	caller, err := c.enter(op, s)
	if err != nil {
		return nil, err
	}
	return caller, c.recordReady()
}

// packetOf returns the packet of rank j.
func (c *ipc) packetOf(j int) packet {
	n := len(c.own.raw)
	return packet{c.all[j*n : (j+1)*n], len(c.peers)}
}

// checkPacket returns an error if rank j makes a different call than rank 0. All ranks have the
// same packets, so all of them find a difference.
func (c *ipc) checkPacket(j int) error {
	p, first := c.packetOf(j), c.packetOf(0)
	switch {
	case p.failed():
		return status.Errorf(status.Comm, "comm.%s: rank %d could not export its tensor; see its error",
			c.own.header().name(), j)
	case p.header() != first.header():
		return status.Errorf(status.Comm,
			"rank %d calls %v, rank 0 calls %v; all ranks must make the same calls in the same order", j, p.header(),
			first.header())
	case p.header().op != opAllToAll && !p.sameRows(first):
		return status.Errorf(status.Comm,
			"comm.%s: the row counts of ranks %d and 0 differ; give the same counts on all ranks", p.header().name(), j)
	}
	return nil
}

// finishReads makes the communication stream wait until all ranks have read their peers' tensors.
func (c *ipc) finishReads() error {
	i := c.rounds % len(c.done)
	c.rounds++
	if err := c.record(c.done[i]); err != nil {
		return err
	}
	if err := c.host.Barrier(); err != nil {
		return c.group.hostFailed(err)
	}
	for j := range c.peers {
		if j == c.me {
			continue
		}
		if err := c.waitRemote(c.peers[j].done[i]); err != nil {
			return err
		}
	}
	return c.mark()
}

// finish ends a call without a request.
func (c *ipc) finish(caller *stream) error {
	if err := c.finishReads(); err != nil {
		return err
	}
	return c.leave(caller)
}

// cleanup is deferred in every call. After a failure it waits until this rank no longer uses the
// memory of other goroutine ranks, and they no longer use its memory.
func (c *ipc) cleanup(err *error) {
	if *err != nil && c.group.shared() {
		c.s.Sync()
	}
	c.group.leave(*err != nil)
}

func (c *ipc) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (_ comm.Request,
	err error) {
	defer c.cleanup(&err)
	n := len(c.peers)
	width := max(comm.RowBytes(dst), comm.RowBytes(src))
	recv, send := c.bytes[n:2*n], c.bytes[2*n:]
	for j := range n {
		recv[j], send[j] = recvRows[j]*width, sendRows[j]*width
	}
	caller, err := c.begin(s, header{op: opAllToAll}, src, recv, send)
	if err != nil {
		return nil, err
	}
	for from := range n {
		for to := range n {
			if sent, expected := c.packetOf(from).sent(to), c.packetOf(to).received(from); sent != expected {
				return nil,
					status.Errorf(status.Comm,
						"comm.AllToAll: rank %d sends %d bytes to rank %d, which expects %d; counts must be equal",
						from, sent, to, expected)
			}
		}
	}
	for k := range n {
		j := (c.me + k) % n // ranks start with different peers
		to := address(dst.Data) + uintptr(comm.RowsBefore(recv, j))
		if err := c.copy(to, c.addrs[j]+uintptr(c.packetOf(j).sentBefore(c.me)), recv[j]); err != nil {
			return nil, err
		}
	}
	if err := c.finishReads(); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	return r, c.s.Record(r.done)
}

func (c *ipc) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) (err error) {
	defer c.cleanup(&err)
	row := comm.RowBytes(dst)
	caller, err := c.begin(s, header{op: opAllGather, unit: row}, src, rows, nil)
	if err != nil {
		return err
	}
	for k := range c.peers {
		j := (c.me + k) % len(c.peers)
		if err := c.copy(address(dst.Data)+uintptr(comm.RowsBefore(rows, j)*row), c.addrs[j], rows[j]*row); err != nil {
			return err
		}
	}
	return c.finish(caller)
}

func (c *ipc) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) (err error) {
	defer c.cleanup(&err)
	row := comm.RowBytes(src)
	caller, err := c.begin(s, header{op: opReduceScatter, dtype: src.DType, unit: row}, src, rows, nil)
	if err != nil {
		return err
	}
	for j := range c.addrs {
		c.addrs[j] += uintptr(comm.RowsBefore(rows, c.me) * row)
	}
	if n := rows[c.me] * row; n > 0 {
		if err := c.combine(address(dst.Data), c.addrs, n/src.DType.Size(), src.DType, comm.Sum); err != nil {
			return err
		}
	}
	return c.finish(caller)
}

// AllReduce combines a shard on each rank, in place, and gathers the shards. If the tensor is
// small, each rank combines the whole tensor in scratch.
func (c *ipc) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) (err error) {
	defer c.cleanup(&err)
	n, elem := t.Numel(), t.DType.Size()
	if t.IsNil() {
		n = 0
	}
	caller, err := c.begin(s, header{op: opAllReduce, dtype: t.DType, how: op, unit: n}, t, nil, nil)
	if err != nil {
		return err
	}
	if n*elem <= smallReduce {
		out := address(c.scratch.Pointer())
		if err := c.combine(out, c.addrs, n, t.DType, op); err != nil {
			return err
		}
		if err := c.finishReads(); err != nil {
			return err
		}
		if err := c.copy(address(t.Data), out, n*elem); err != nil {
			return err
		}
		return c.leave(caller)
	}
	shard := func(j int) (at uintptr, count int64) {
		lo, hi := comm.Shard(n, len(c.peers), j)
		return uintptr(lo * elem), hi - lo
	}
	at, count := shard(c.me)
	for j := range c.addrs {
		c.addrs[j] += at
	}
	if err := c.combine(c.addrs[c.me], c.addrs, count, t.DType, op); err != nil {
		return err
	}
	if err := c.finishReads(); err != nil {
		return err
	}
	for k := range c.peers {
		j := (c.me + k) % len(c.peers)
		place, count := shard(j)
		if err := c.copy(address(t.Data)+place, c.addrs[j]-at+place, count*elem); err != nil {
			return err
		}
	}
	return c.finish(caller)
}

func (c *ipc) Broadcast(s device.Stream, t tensor.Tensor, root int) (err error) {
	defer c.cleanup(&err)
	var bytes int64
	if !t.IsNil() {
		bytes = t.Bytes()
	}
	caller, err := c.begin(s, header{op: opBroadcast, root: root, unit: bytes}, t, nil, nil)
	if err != nil {
		return err
	}
	if err := c.copy(address(t.Data), c.addrs[root], bytes); err != nil {
		return err
	}
	return c.finish(caller)
}

func bytesOf(b []byte) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(b)), tensor.U8, int64(len(b)))
}
