package main

import (
	"fmt"
	"os"
	"unsafe"

	"ulysses/backends"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// gpu is what a context on a GPU has beyond one on the CPU: a place in a program with streams,
// memory and a current GPU of its own.
//
// Every call works on the context's one stream, whose scratch was allocated with it. It is ordered
// by events behind what the caller's stream holds when the call comes, and before what comes on it
// later: so nothing is allocated for a stream that was never seen before, calls on several streams
// may share the context's own workspace, and no call waits for the GPU.
type gpu struct {
	dev    *cuda.Device
	guest  *cuda.ExternalStream
	thread uintptr // what the calling thread was on before the call
	theirs uintptr // stream of the call under way
	late   error   // asynchronous, and kept
	// Other processes map what is exchanged and keep it until the communicator is closed. The
	// caller's memory may be freed sooner: exchanges are in the context's own, and what has been
	// outgrown is kept.
	maps    bool
	retired []device.Buffer
}

// comms are the header's ways for tensors of a GPU, by its numbers, as package backends names them.
var comms = [...]struct{ policy, kind string }{{"auto", ""}, {"mpi", "staged"}, {"nccl", "nccl"}, {"ipc", "ipc"}}

const wayHost = 1 // through host memory, as on the CPU

// openGPU opens the GPU of the settings. The program's thread stays on the one that it has chosen.
func (c *context) openGPU(op string, s settings) error {
	d, err := cuda.Open(cuda.Options{Ordinal: int(s.ordinal), Kernels: os.Getenv("ULYSSES_KERNEL")})
	if err != nil {
		return status.Errorf(status.Of(err), "%s: ordinal %d: %w", op, s.ordinal, err)
	}
	c.dev, c.gpu = d, &gpu{dev: d, thread: d.SaveContext()}
	c.place, c.ordinal = onCUDA, s.ordinal
	if c.gpu.guest, err = d.NewExternalStream(); err != nil {
		return err
	}
	return nil
}

// openComm puts a communicator for tensors of the GPU on top of the host's. One rank alone
// exchanges nothing. Collective.
func (c *context) openComm(op string, s settings) error {
	if c.gpu == nil || c.comm.Size() == 1 {
		return nil
	}
	made, why, err := backends.OpenComm(c.dev, c.comm, comms[s.comm].policy)
	if err != nil {
		return status.Errorf(status.Of(err), "%s: comm %d: %w (in the terms of a job: auto 0, mpi 1, nccl 2, ipc 3)", op, s.comm, err)
	}
	c.comm = made
	c.gpu.maps = made.(*cuda.Comm).Maps()
	c.say(fmt.Sprintf(`{"event":"comm","rank":%d,"kind":%q,"why":%q}`, made.Rank(), made.Kind(), why))
	return nil
}

// way is the header's number of the way that tensors go.
func (c *context) way() int32 {
	for i, w := range comms {
		if w.kind != "" && w.kind == c.comm.Kind() {
			return int32(i)
		}
	}
	return wayHost
}

// enter and leave keep the calling thread's GPU; a nil gpu does nothing.
func (g *gpu) enter() {
	if g != nil {
		g.thread = g.dev.SaveContext()
	}
}

func (g *gpu) leave() {
	if g != nil {
		g.dev.RestoreContext(g.thread)
	}
}

// join orders what a call enqueues behind what the caller's stream holds; a call that joins ends in
// part.
func (c *context) join(op string, stream unsafe.Pointer) error {
	if c.gpu == nil {
		return nil
	}
	c.gpu.theirs = uintptr(stream)
	if err := c.gpu.guest.Enter(c.gpu.theirs, c.stream); err != nil {
		return status.Errorf(status.Of(err), "%s: %w", op, err)
	}
	return nil
}

// part orders what comes later on the caller's stream behind what the call has enqueued, be it
// whole or not, and hands on the call's error.
func (c *context) part(err error) error {
	if c.gpu == nil {
		return err
	}
	if left := c.gpu.guest.Leave(c.gpu.theirs, c.stream); err == nil {
		err = left
	}
	return err
}

// reach refuses memory that the context's GPU does not have, whatever the caller says of it: a
// kernel that meets such an address ends all work of the process on the GPU.
func (c *context) reach(op, name string, p unsafe.Pointer) error {
	if c.gpu == nil {
		return nil
	}
	at, ordinal, err := c.gpu.guest.MemoryKindOf(p)
	switch {
	case err != nil:
		return status.Errorf(status.Of(err), "%s: %s: %w", op, name, err)
	case at == cuda.ManagedMemory:
		return nil
	case at != cuda.GPUMemory:
		return invalid("%s: %s lies at %#x, which is memory of the host: this context works on GPU %d: copy it there", op, name, uintptr(p), c.ordinal)
	case ordinal != int(c.ordinal):
		return invalid("%s: %s lies at %#x in memory of GPU %d: this context works on GPU %d: copy it there", op, name, uintptr(p), ordinal, c.ordinal)
	}
	return nil
}

// maps reports that exchanges are in the context's own memory, whatever memory a call brings.
func (c *context) maps() bool { return c.gpu != nil && c.gpu.maps }

// asked is for queries of workspace: a context whose exchanges are in its own memory makes that as
// large as it says.
func (c *context) asked(bytes int64) error {
	if !c.maps() {
		return nil
	}
	return c.reserve(bytes)
}

// wireOf is a request's workspace: the caller's, or the request's own, made when it is first needed
// and kept for later ones.
func (c *context) wireOf(op string, r *request, given tensor.Tensor, need int64) (tensor.Tensor, error) {
	switch {
	case need == 0 || !given.IsNil() && !c.maps():
		return given, nil
	case given.IsNil() && c.hostOwns:
		return given, c.noWorkspace(op, need)
	case !given.IsNil() && given.Numel() < need:
		return given, sizeOf(op, "workspace", given, need)
	}
	if r.wire == nil || r.wire.Bytes() < need {
		b, err := c.dev.Alloc(need)
		if err != nil {
			return given, status.Errorf(status.Of(err), "%s: the request's own workspace: %w: give one, or start fewer requests at a time", op, err)
		}
		if r.wire != nil && c.maps() {
			c.gpu.retired = append(c.gpu.retired, r.wire)
		} else if r.wire != nil {
			r.wire.Free()
		}
		r.wire = b
	}
	return c.bytes(r.wire.Pointer(), r.wire.Bytes()), nil
}

// lateError is what went wrong on the GPU since the last call, without waiting.
func (c *context) lateError() error {
	g := c.gpu
	if g == nil || g.late != nil {
		if g != nil {
			return g.late
		}
		return nil // the CPU is done when a call returns
	}
	err := cuda.Failure(c.stream)
	if m, ok := c.comm.(*cuda.Comm); ok && err == nil {
		err = m.Failure()
	}
	if err != nil {
		g.late = status.Errorf(status.Of(err), "ulysses_context_async_error: %w", err)
	}
	return g.late
}

// end waits for the context's work and gives up what it stands on, in the order in which peers need
// it. Collective.
func (c *context) end() error {
	if c.stream != nil {
		c.stream.Close()
	}
	err := c.comm.Close() // after it, nobody reads this rank's memory
	if c.own != nil {
		c.own.Free()
	}
	for _, r := range c.requests {
		if r.wire != nil {
			r.wire.Free()
		}
	}
	if c.gpu != nil {
		for _, b := range c.gpu.retired {
			b.Free()
		}
		if c.gpu.guest != nil {
			c.gpu.guest.Close()
		}
	}
	if c.dev != nil {
		c.dev.Close()
	}
	return err
}

// bytes is a block of bytes where the context works.
func (c *context) bytes(p unsafe.Pointer, n int64) tensor.Tensor {
	t := tensor.Of(p, tensor.U8, n)
	t.Where = c.dev.Info().Place
	return t
}
