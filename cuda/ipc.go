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

// smallReduce is the bytes up to which each rank combines the whole tensor itself: one meeting
// less.
const smallReduce = 64 << 10

// ipc moves tensors between GPUs that reach each other's memory, or within one that several ranks
// share: goroutine ranks by plain addresses, processes of a node by CUDA IPC.
//
// Ranks pull: each writes into its own memory alone, so a wrong peer can spoil nothing here, and
// reductions, which have to read, go the same way. A call has two meetings on the host's
// communicator. At the first (meet), packets tell where everyone's tensor lies and that the event
// "ready" has been recorded, behind what the caller's stream holds. At the second (settle),
// everyone has enqueued its copies and recorded "done"; all communication streams then wait for all
// of those, so that whoever is past a call knows that nobody reads his tensor any more. The host
// waits for hosts, never for a GPU, and no GPU spins.
//
// One event of each kind is enough: a rank records "ready" anew only when all have passed the last
// call's second meeting, hence enqueued their waits for it; and "done" only when all have entered
// the next call.
type ipc struct {
	*commStream
	host     comm.Comm
	me       int
	ready    *event // this rank's tensor is there
	done     *event // and this rank has read the others'
	peers    []peer
	pairs    []*event // by rank: that this rank has read what that one sent it (sendRecv)
	receipts []byte
	maps     *mappings
	mapped   map[mapping]uintptr
	mine     packet
	all      []byte        // everyone's packets
	bytes    []int64       // three vectors of size: of a packet; received and sent by an all-to-all
	at       []uintptr     // by rank: its tensor, as this rank reaches it
	scratch  device.Buffer // of small reductions
	room     *room
}

func (c *ipc) kind() string { return "ipc" }
func (c *ipc) abort()       {}

// meet enters a call: what the caller's stream holds comes first, and packets are exchanged.
// Afterwards the communication stream has waited for all ranks' tensors, c.at says where they lie,
// and theirs(j) what rank j says.
func (c *ipc) meet(s device.Stream, h header, t tensor.Tensor, recvRows, sendRows []int64) (*stream, error) {
	c.room.enter()
	caller, err := c.come(h.name(), s)
	if err != nil {
		return nil, err
	}
	c.mine.write(h, recvRows, sendRows)
	packErr := c.locate(t)
	if packErr != nil {
		c.mine.fail()
	}
	if err := c.host.AllGather(nil, bytesOf(c.all), bytesOf(c.mine.raw), c.bytes[:len(c.peers)]); err != nil {
		return nil, c.room.lost(err)
	}
	if packErr != nil {
		return nil, packErr
	}
	for j := range c.peers {
		if err := c.agree(j); err != nil {
			return nil, err
		}
	}
	for j := range c.peers {
		if j == c.me {
			c.at[j] = number(t.Data)
			continue
		}
		if err := c.await(c.peers[j].ready); err != nil {
			return nil, err
		}
		if c.at[j], err = c.reach(j, c.theirs(j)); err != nil {
			return nil, err
		}
	}
	return caller, nil
}

// come enters a call and tells the others by "ready", on the communication stream like all that
// other processes wait for: what CUDA makes of an event of several processes whose marks are in two
// streams, and come in another order than they were made, is said nowhere.
func (c *ipc) come(op string, s device.Stream) (*stream, error) {
	caller, err := c.enter(op, s)
	if err != nil {
		return nil, err
	}
	return caller, c.s.Record(c.ready)
}

// theirs is rank j's packet.
func (c *ipc) theirs(j int) packet {
	n := len(c.mine.raw)
	return packet{c.all[j*n : (j+1)*n], len(c.peers)}
}

// agree refuses a call that rank j makes otherwise than this one; all ranks see the same packets,
// and the difference somewhere.
func (c *ipc) agree(j int) error {
	p, first := c.theirs(j), c.theirs(0)
	switch {
	case p.failed():
		return status.Errorf(status.Comm, "comm.%s: rank %d cannot let others reach its memory and has said why", c.mine.header().name(), j)
	case p.header() != first.header():
		return status.Errorf(status.Comm, "rank %d calls %v where rank 0 calls %v: all ranks must call in one order", j, p.header(), first.header())
	case p.header().op != opAllToAll && !p.sameRows(first):
		return status.Errorf(status.Comm, "comm.%s: the rows of ranks %d and 0 differ: all ranks must give the same", p.header().name(), j)
	}
	return nil
}

// settle ends the part of a call in which ranks read each other's tensors: the communication stream
// waits until all have.
func (c *ipc) settle() error {
	if err := c.s.Record(c.done); err != nil {
		return err
	}
	if err := c.host.Barrier(); err != nil {
		return c.room.lost(err)
	}
	for j := range c.peers {
		if j == c.me {
			continue
		}
		if err := c.await(c.peers[j].done); err != nil {
			return err
		}
	}
	return nil
}

// end settles a call that is waited for at once.
func (c *ipc) end(caller *stream) error {
	if err := c.settle(); err != nil {
		return err
	}
	return c.leave(caller)
}

// over is deferred by every call. After a failure nothing of this rank is left in others' memory,
// and nothing of theirs in its own.
func (c *ipc) over(err *error) {
	if *err != nil && c.room.here() {
		c.s.Sync()
	}
	c.room.leave(*err != nil)
}

func (c *ipc) start(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (_ comm.Request, err error) {
	defer c.over(&err)
	n := len(c.peers)
	width := max(comm.RowBytes(dst), comm.RowBytes(src))
	recv, send := c.bytes[n:2*n], c.bytes[2*n:]
	for j := range n {
		recv[j], send[j] = recvRows[j]*width, sendRows[j]*width
	}
	caller, err := c.meet(s, header{op: opAllToAll}, src, recv, send)
	if err != nil {
		return nil, err
	}
	for from := range n {
		for to := range n {
			if sent, expected := c.theirs(from).sent(to), c.theirs(to).received(from); sent != expected {
				return nil, status.Errorf(status.Comm, "comm.AllToAll: rank %d sends %d bytes to rank %d, which expects %d", from, sent, to, expected)
			}
		}
	}
	for k := range n {
		j := (c.me + k) % n // everyone starts with another rank's memory
		to := number(dst.Data) + uintptr(comm.RowsBefore(recv, j))
		if err := c.copy(to, c.at[j]+uintptr(c.theirs(j).sentBefore(c.me)), recv[j]); err != nil {
			return nil, err
		}
	}
	if err := c.settle(); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	return r, c.s.Record(r.done)
}

func (c *ipc) allGather(s device.Stream, dst, src tensor.Tensor, rows []int64) (err error) {
	defer c.over(&err)
	row := comm.RowBytes(dst)
	caller, err := c.meet(s, header{op: opAllGather, unit: row}, src, rows, nil)
	if err != nil {
		return err
	}
	for k := range c.peers {
		j := (c.me + k) % len(c.peers)
		if err := c.copy(number(dst.Data)+uintptr(comm.RowsBefore(rows, j)*row), c.at[j], rows[j]*row); err != nil {
			return err
		}
	}
	return c.end(caller)
}

func (c *ipc) reduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) (err error) {
	defer c.over(&err)
	row := comm.RowBytes(src)
	caller, err := c.meet(s, header{op: opReduceScatter, dtype: src.DType, unit: row}, src, rows, nil)
	if err != nil {
		return err
	}
	for j := range c.at {
		c.at[j] += uintptr(comm.RowsBefore(rows, c.me) * row)
	}
	if n := rows[c.me] * row; n > 0 {
		if err := c.combine(number(dst.Data), c.at, n/src.DType.Size(), src.DType, comm.Sum); err != nil {
			return err
		}
	}
	return c.end(caller)
}

// allReduce combines a shard on each rank, in place, and gathers the shards; a small tensor each
// rank combines itself, beside it.
func (c *ipc) allReduce(s device.Stream, t tensor.Tensor, op comm.Op) (err error) {
	defer c.over(&err)
	n, elem := t.Numel(), t.DType.Size()
	if t.IsNil() {
		n = 0
	}
	caller, err := c.meet(s, header{op: opAllReduce, dtype: t.DType, how: op, unit: n}, t, nil, nil)
	if err != nil {
		return err
	}
	if n*elem <= smallReduce {
		out := number(c.scratch.Pointer())
		if err := c.combine(out, c.at, n, t.DType, op); err != nil {
			return err
		}
		if err := c.settle(); err != nil {
			return err
		}
		if err := c.copy(number(t.Data), out, n*elem); err != nil {
			return err
		}
		return c.leave(caller)
	}
	shard := func(j int) (at uintptr, count int64) {
		lo, hi := comm.Shard(n, len(c.peers), j)
		return uintptr(lo * elem), hi - lo
	}
	at, count := shard(c.me)
	for j := range c.at {
		c.at[j] += at
	}
	if err := c.combine(c.at[c.me], c.at, count, t.DType, op); err != nil {
		return err
	}
	if err := c.settle(); err != nil {
		return err
	}
	for k := range c.peers {
		j := (c.me + k) % len(c.peers)
		place, count := shard(j)
		if err := c.copy(number(t.Data)+place, c.at[j]-at+place, count*elem); err != nil {
			return err
		}
	}
	return c.end(caller)
}

func (c *ipc) broadcast(s device.Stream, t tensor.Tensor, root int) (err error) {
	defer c.over(&err)
	var bytes int64
	if !t.IsNil() {
		bytes = t.Bytes()
	}
	caller, err := c.meet(s, header{op: opBroadcast, root: root, unit: bytes}, t, nil, nil)
	if err != nil {
		return err
	}
	if err := c.copy(number(t.Data), c.at[root], bytes); err != nil {
		return err
	}
	return c.end(caller)
}

func bytesOf(b []byte) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(b)), tensor.U8, int64(len(b)))
}
