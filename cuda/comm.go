package cuda

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Comm is a communicator for GPU memory on top of a communicator for host memory of the same ranks.
// The host's communicator moves host tensors. A transport moves device tensors: NCCL, the memory of
// other ranks (ipc), or pinned host memory (staged). If all tensors of a call are absent, the
// transport runs the call if a stream is given, else the host's communicator does.
//
// A call with device tensors does not wait. It runs after everything that its stream holds and
// before everything that is enqueued there later. Only the goroutine that the device serves may
// make such calls.
type Comm struct {
	host      comm.Comm
	transport transport
	remake    maker // of transports of the same kind for fewer ranks
	closed    bool
}

// mover has the methods of comm.Comm that move tensors.
type mover interface {
	AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error)
	AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error
	AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error
	Broadcast(s device.Stream, t tensor.Tensor, root int) error
	SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error
}

// transport moves device tensors. Comm has checked the arguments of this rank; a transport checks
// conditions on the arguments of several ranks.
type transport interface {
	mover
	kind() string
	abort()
	close() error
}

// maker makes a transport over the ranks of a communicator for host memory, with the communication
// stream of this use.
type maker func(host comm.Comm, use streamUse) (transport, error)

// newComm makes a communicator. It is collective over host, and all ranks fail together. A
// transport that make returns together with an error is closed after all ranks have agreed.
func newComm(host comm.Comm, make maker, use streamUse) (*Comm, error) {
	k, err := make(host, use)
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

// Waited returns the time in which ranks have waited for one another on the host. Waiting inside
// kernels of NCCL is not measured.
func (c *Comm) Waited() time.Duration {
	if w, ok := c.host.(comm.Waiter); ok {
		return w.Waited()
	}
	return 0
}

// Split makes communicators of the same kind and splits the host's communicator with them.
// Collective.
func (c *Comm) Split(color, key int) (comm.Comm, error) { return c.split(color, key, forComm) }

// SplitPriority is Split. The communicators use a stream with priority, where that is safe
// (commStream).
func (c *Comm) SplitPriority(color, key int) (comm.Comm, error) {
	return c.split(color, key, forPriority)
}

func (c *Comm) split(color, key int, use streamUse) (comm.Comm, error) {
	sub, err := c.host.Split(color, key)
	if err != nil || sub == nil {
		return nil, err
	}
	made, err := newComm(sub, c.remake, use)
	if err != nil {
		sub.Close()
		return nil, err
	}
	return made, nil
}

// route returns the mover for the memory of the tensors a and b: the transport or the host's
// communicator. deviceErr is the result of the checks for device tensors. The host's communicator
// checks host tensors itself.
func (c *Comm) route(op string, s device.Stream, a, b tensor.Tensor, deviceErr error) (mover, error) {
	if c.closed {
		return nil, status.Errorf(status.InvalidArgument, "comm.%s: the communicator is closed", op)
	}
	onDevice := s != nil
	switch {
	case a.IsNil() && b.IsNil():
	case a.IsNil():
		onDevice = b.Where == tensor.CUDA
	case b.IsNil() || a.Where == b.Where:
		onDevice = a.Where == tensor.CUDA
	default:
		return nil, status.Errorf(status.InvalidArgument,
			"comm.%s: one of %v and %v is in device memory, the other is not; copy one first", op, a, b)
	}
	if !onDevice {
		return c.host, nil
	}
	return c.transport, deviceErr
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
	err := comm.CheckAllToAll(dst, src, recvRows, sendRows, c.Size())
	if err == nil {
		own := c.Rank()
		err = comm.CheckOwnBlock("comm.AllToAll", own, sendRows[own]*comm.RowBytes(src),
			recvRows[own]*comm.RowBytes(dst))
	}
	m, err := c.route("AllToAll", s, dst, src, err)
	if err != nil {
		return nil, err
	}
	return m.AllToAllStart(s, dst, src, recvRows, sendRows)
}

func (c *Comm) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	m, err := c.route("AllReduce", s, t, t, comm.CheckAllReduce(t, op))
	if err != nil {
		return err
	}
	return m.AllReduce(s, t, op)
}

func (c *Comm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	m, err := c.route("AllGather", s, dst, src, comm.CheckAllGather(dst, src, rows, c.Rank(), c.Size()))
	if err != nil {
		return err
	}
	return m.AllGather(s, dst, src, rows)
}

func (c *Comm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	m, err := c.route("ReduceScatter", s, dst, src, comm.CheckReduceScatter(dst, src, rows, c.Rank(), c.Size()))
	if err != nil {
		return err
	}
	return m.ReduceScatter(s, dst, src, rows)
}

func (c *Comm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	m, err := c.route("Broadcast", s, t, t, comm.CheckBroadcast(t, root, c.Size()))
	if err != nil {
		return err
	}
	return m.Broadcast(s, t, root)
}

func (c *Comm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	err := comm.CheckSendRecv(recv, from, send, to, c.Size())
	if own := c.Rank(); err == nil && from == own && to == own {
		err = comm.CheckOwnBlock("comm.SendRecv", own, size(send), size(recv))
	}
	m, err := c.route("SendRecv", s, recv, send, err)
	if err != nil {
		return err
	}
	return m.SendRecv(s, recv, from, send, to)
}

// Reserve allocates, before the first step, the pinned memory for n all-to-alls at a time. bytes is
// the sum of the bytes that this rank sends and receives in one of them. Without Reserve, the first
// all-to-alls allocate it. It is not collective.
func (c *Comm) Reserve(n int, bytes int64) error {
	if r, ok := c.transport.(interface{ reserve(int, int64) error }); ok {
		return r.reserve(n, bytes)
	}
	return nil
}

// SetChunk sets the bytes of a chunk in which the staged transport runs reductions, gathers,
// broadcasts and messages. All ranks must set the same value. It is for tests, which otherwise need
// large tensors.
func (c *Comm) SetChunk(bytes int64) {
	if k, ok := c.transport.(*staged); ok {
		k.chunk = bytes
	}
}

// Abort ends the job.
func (c *Comm) Abort(code status.Code, reason string) {
	c.transport.abort()
	c.host.Abort(code, reason)
}

// Close waits for the communication stream and closes this communicator and the host's. It is
// collective; after a failure no rank calls it. Free tensors that were moved only after Close.
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

// MaxRanks is the maximum number of ranks of an IPC or NCCL communicator.
const MaxRanks = 64

// transports has the constructors, by kind.
var transports = map[string]func(*Device, comm.Comm, streamUse) (transport, error){"ipc": newIPC, "nccl": newNCCL,
	"staged": newStaged}

// NewComm makes a communicator of kind "nccl", "ipc" or "staged" for a device on top of the host's
// communicator, which the result owns. It is collective over host, and all ranks fail together.
func NewComm(d *Device, host comm.Comm, kind string) (*Comm, error) {
	make := transports[kind]
	if make == nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.NewComm: kind %q is unknown; use nccl, ipc or staged",
			kind)
	}
	return newComm(host, func(h comm.Comm, use streamUse) (transport, error) { return make(d, h, use) }, forComm)
}
