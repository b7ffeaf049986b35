package cuda

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Comm is a communicator for GPU memory on top of a communicator for host memory of the same ranks.
// The host's communicator moves host tensors. A transport moves device tensors: NCCL, the memory of
// peers (ipc), or host memory (staged). If all tensors of a call are absent, the transport serves
// the call if a stream is given, else the host's communicator does.
//
// A call with device tensors does not wait. It runs after everything that its stream holds and
// before everything that is enqueued there later. Only the goroutine that the device serves may
// make such calls.
type Comm struct {
	host      comm.Comm
	transport transport
	remake    func(part comm.Comm) (transport, error) // the same way among fewer ranks
	closed    bool
}

// transport moves device tensors. Comm has checked the arguments of this rank; a transport checks
// what depends on the arguments of several ranks.
type transport interface {
	kind() string
	start(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error)
	allReduce(s device.Stream, t tensor.Tensor, op comm.Op) error
	allGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	reduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	broadcast(s device.Stream, t tensor.Tensor, root int) error
	sendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error
	abort()
	close() error
}

// newComm makes a communicator. It is collective over host, and all ranks fail together. A
// transport that make returns together with an error is closed after all ranks have agreed.
func newComm(host comm.Comm, make func(comm.Comm) (transport, error)) (*Comm, error) {
	k, err := make(host)
	if err = comm.Agree(host, err); err != nil {
		if k != nil {
			k.close()
		}
		return nil, err
	}
	return &Comm{host: host, transport: k, remake: make}, nil
}

// Host returns the communicator for host memory.
func (c *Comm) Host() comm.Comm { return c.host }
func (c *Comm) Rank() int       { return c.host.Rank() }
func (c *Comm) Size() int       { return c.host.Size() }
func (c *Comm) Kind() string    { return c.transport.kind() }
func (c *Comm) Barrier() error  { return c.host.Barrier() }

// Split makes communicators of the same kind and splits the host's communicator with them.
func (c *Comm) Split(color, key int) (comm.Comm, error) {
	part, err := c.host.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	made, err := newComm(part, c.remake)
	if err != nil {
		part.Close()
		return nil, err
	}
	return made, nil
}

// onDevice reports whether a call is for the device, by the memory of its tensors.
func (c *Comm) onDevice(op string, s device.Stream, a, b tensor.Tensor) (bool, error) {
	if c.closed {
		return false, status.Errorf(status.InvalidArgument, "comm.%s: the communicator is closed", op)
	}
	switch {
	case a.IsNil() && b.IsNil():
		return s != nil, nil
	case a.IsNil():
		return b.Where == tensor.CUDA, nil
	case b.IsNil() || a.Where == b.Where:
		return a.Where == tensor.CUDA, nil
	}
	return false, status.Errorf(status.InvalidArgument, "comm.%s: one of %v and %v is in device memory, the other is not: copy one first", op, a, b)
}

func (c *Comm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	r, err := c.AllToAllStart(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	return r.Wait()
}

func (c *Comm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	ours, err := c.onDevice("AllToAll", s, dst, src)
	if err != nil {
		return nil, err
	}
	if !ours {
		return c.host.AllToAllStart(s, dst, src, recvRows, sendRows)
	}
	if err := comm.CheckAllToAll(dst, src, recvRows, sendRows, c.Size()); err != nil {
		return nil, err
	}
	me := c.Rank()
	if send, recv := sendRows[me]*comm.RowBytes(src), recvRows[me]*comm.RowBytes(dst); send != recv {
		return nil, status.Errorf(status.InvalidArgument, "comm.AllToAll: rank %d sends itself %d bytes and expects %d", me, send, recv)
	}
	return c.transport.start(s, dst, src, recvRows, sendRows)
}

func (c *Comm) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	ours, err := c.onDevice("AllReduce", s, t, t)
	if err != nil {
		return err
	}
	if !ours {
		return c.host.AllReduce(s, t, op)
	}
	if err := comm.CheckAllReduce(t, op); err != nil {
		return err
	}
	return c.transport.allReduce(s, t, op)
}

func (c *Comm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	ours, err := c.onDevice("AllGather", s, dst, src)
	if err != nil {
		return err
	}
	if !ours {
		return c.host.AllGather(s, dst, src, rows)
	}
	if err := comm.CheckAllGather(dst, src, rows, c.Rank(), c.Size()); err != nil {
		return err
	}
	return c.transport.allGather(s, dst, src, rows)
}

func (c *Comm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	ours, err := c.onDevice("ReduceScatter", s, dst, src)
	if err != nil {
		return err
	}
	if !ours {
		return c.host.ReduceScatter(s, dst, src, rows)
	}
	if err := comm.CheckReduceScatter(dst, src, rows, c.Rank(), c.Size()); err != nil {
		return err
	}
	return c.transport.reduceScatter(s, dst, src, rows)
}

func (c *Comm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	ours, err := c.onDevice("Broadcast", s, t, t)
	if err != nil {
		return err
	}
	if !ours {
		return c.host.Broadcast(s, t, root)
	}
	if err := comm.CheckBroadcast(t, root, c.Size()); err != nil {
		return err
	}
	return c.transport.broadcast(s, t, root)
}

func (c *Comm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	ours, err := c.onDevice("SendRecv", s, recv, send)
	if err != nil {
		return err
	}
	if !ours {
		return c.host.SendRecv(s, recv, from, send, to)
	}
	if err := comm.CheckSendRecv(recv, from, send, to, c.Size()); err != nil {
		return err
	}
	return c.transport.sendRecv(s, recv, from, send, to)
}

// Reserve makes, before the first step, what n exchanges at a time need beside the tensors, in
// which this rank sends and receives so many bytes in all. Without it the first exchanges make it.
func (c *Comm) Reserve(n int, bytes int64) error {
	if r, ok := c.transport.(interface{ reserve(int, int64) error }); ok {
		return r.reserve(n, bytes)
	}
	return nil
}

// SetChunk sets how many bytes a reduction, gather, broadcast or message through the host has under way
// at a time; all ranks say the same. It is for tests, which would otherwise need large tensors.
func (c *Comm) SetChunk(bytes int64) {
	if k, ok := c.transport.(*staged); ok {
		k.piece = bytes
	}
}

// Abort ends the job.
func (c *Comm) Abort(code status.Code, reason string) {
	c.transport.abort()
	c.host.Abort(code, reason)
}

// Close waits for what is under way and gives both communicators up. All ranks call it, but after a
// failure, when none does. Memory that was exchanged is freed after it.
func (c *Comm) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	err := c.transport.close()
	if hostErr := c.host.Close(); err == nil {
		err = hostErr
	}
	return err
}

var _ comm.Layered = (*Comm)(nil)

// MaxRanks is how many ranks an IPC or NCCL communicator may have.
const MaxRanks = 64

// makers by kind.
var makers = map[string]func(*Device, comm.Comm) (transport, error){"ipc": newIPC, "nccl": newNCCL, "staged": newStaged}

// NewComm makes a communicator of kind "nccl", "ipc" or "staged" for a device on top of the host's;
// all ranks call it, and fail together.
func NewComm(d *Device, host comm.Comm, kind string) (*Comm, error) {
	make := makers[kind]
	if make == nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.NewComm: kind %q: nccl, ipc or staged", kind)
	}
	return newComm(host, func(h comm.Comm) (transport, error) { return make(d, h) })
}
