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

// gpu has the fields of a context that exist only on a GPU. The host program has its own streams,
// memory and current GPU.
//
// Every call enqueues its work on the context's own stream, whose workspace was allocated with the
// stream. Events order this work after what is on the caller's stream when the call comes, and
// before what the caller enqueues later. Therefore nothing is allocated for a new stream of the
// caller, calls on several streams may share the context's workspace, and no call waits for the
// GPU.
type gpu struct {
	dev          *cuda.Device
	external     *cuda.ExternalStream
	current      uintptr // the calling thread's CUDA context from before the call
	callerStream uintptr // of the current call
	asyncErr     error   // the first asynchronous error
	// With CUDA IPC, other processes map the memory that is sent, until the communicator is closed.
	// The caller may free its memory sooner. Therefore only memory of the context is sent, and
	// buffers that were replaced by larger ones are kept in retired.
	ownMemoryOnly bool
	retired       []device.Buffer
}

// transports are the transports of the header, by its numbers: the name of the policy in package
// backends, and the kind of communicator that uses it.
var transports = [...]struct{ policy, kind string }{{"auto", ""}, {"mpi", "staged"}, {"nccl", "nccl"}, {"ipc", "ipc"}}

// transportHost is ULYSSES_COMM_HOST: through host memory, as on the CPU.
const transportHost = 1

// openGPU opens the GPU of the settings. gpu.leave restores the calling thread's current GPU.
func (c *context) openGPU(op string, s settings) error {
	d, err := cuda.Open(cuda.Options{Ordinal: int(s.ordinal), Kernels: os.Getenv("ULYSSES_KERNEL")})
	if err != nil {
		return status.Errorf(status.Of(err), "%s: ordinal %d: %w", op, s.ordinal, err)
	}
	c.dev, c.gpu = d, &gpu{dev: d, current: d.SaveContext()}
	c.deviceType, c.ordinal = onCUDA, s.ordinal
	if c.gpu.external, err = d.NewExternalStream(); err != nil {
		return err
	}
	return nil
}

// openComm wraps the host's communicator in one for tensors on the GPU. A context of one rank needs
// none. Collective.
func (c *context) openComm(op string, s settings) error {
	if c.gpu == nil || c.comm.Size() == 1 {
		return nil
	}
	made, why, err := backends.OpenComm(c.dev, c.comm, transports[s.comm].policy)
	if err != nil {
		return status.Errorf(status.Of(err), "%s: comm %d (%s): %w", op, s.comm, transports[s.comm].policy, err)
	}
	c.comm = made
	c.gpu.ownMemoryOnly = made.(*cuda.Comm).Maps()
	c.logLine(fmt.Sprintf(`{"event":"comm","rank":%d,"kind":%q,"why":%q}`, made.Rank(), made.Kind(), why))
	return nil
}

// transport returns the header's number (ULYSSES_COMM_...) of the transport of tensors.
func (c *context) transport() int32 {
	for i, t := range transports {
		if t.kind != "" && t.kind == c.comm.Kind() {
			return int32(i)
		}
	}
	return transportHost
}

// enter and leave store and restore the calling thread's current GPU. A nil gpu does nothing.
func (g *gpu) enter() {
	if g != nil {
		g.current = g.dev.SaveContext()
	}
}

func (g *gpu) leave() {
	if g != nil {
		g.dev.RestoreContext(g.current)
	}
}

// enqueue runs work, which enqueues operations on the context's stream. They run after what is on
// the caller's stream now, and before what the caller enqueues later.
func (c *context) enqueue(op string, stream uintptr, work func() error) error {
	if err := c.waitForCaller(op, stream); err != nil {
		return err
	}
	return c.callerWaits(work())
}

// waitForCaller lets the context's stream wait for what is on the caller's stream now.
func (c *context) waitForCaller(op string, stream uintptr) error {
	if c.gpu == nil {
		return nil
	}
	c.gpu.callerStream = stream
	if err := c.gpu.external.Enter(c.gpu.callerStream, c.stream); err != nil {
		return status.Errorf(status.Of(err), "%s: %w", op, err)
	}
	return nil
}

// callerWaits lets the caller's stream wait for what is on the context's stream now, even if the
// call has failed with err. It returns err.
func (c *context) callerWaits(err error) error {
	if c.gpu == nil {
		return err
	}
	if left := c.gpu.external.Leave(c.gpu.callerStream, c.stream); err == nil {
		err = left
	}
	return err
}

// checkAddress refuses memory that the context's GPU cannot access, whatever device the tensor
// names. A kernel that accesses such memory ends all work of the process on the GPU.
func (c *context) checkAddress(op, name string, p unsafe.Pointer) error {
	if c.gpu == nil {
		return nil
	}
	where, ordinal, err := c.gpu.external.MemoryKindOf(p)
	switch {
	case err != nil:
		return status.Errorf(status.Of(err), "%s: %s: %w", op, name, err)
	case where == cuda.ManagedMemory:
		return nil
	case where != cuda.GPUMemory:
		return invalid("%s: %s is at %#x, which is memory of the host, and this context is on GPU %d; copy it to the GPU",
			op, name, uintptr(p), c.ordinal)
	case ordinal != int(c.ordinal):
		return invalid("%s: %s is at %#x, which is memory of GPU %d, and this context is on GPU %d; copy it to the context's GPU",
			op, name, uintptr(p), ordinal, c.ordinal)
	}
	return nil
}

// ownMemoryOnly reports whether tensors are sent from the context's own memory only, even if a call
// has a workspace.
func (c *context) ownMemoryOnly() bool { return c.gpu != nil && c.gpu.ownMemoryOnly }

// reserveQueried is called with the result of a query for workspace. If tensors are sent from the
// context's own memory, it makes this memory as large as the result.
func (c *context) reserveQueried(bytes int64) error {
	if !c.ownMemoryOnly() {
		return nil
	}
	return c.reserve(bytes)
}

// ownMemory is memory that a request or a pass uses if the caller gives no workspace. It is
// allocated when it is first needed, and kept for later requests or passes.
type ownMemory struct{ buffer device.Buffer }

func (m *ownMemory) free() {
	if m.buffer != nil {
		m.buffer.Free()
	}
}

// workspaceOf returns the workspace of a request or a pass: the caller's, or its own.
func (c *context) workspaceOf(op string, m *ownMemory, given tensor.Tensor, need int64) (tensor.Tensor, error) {
	switch {
	case need == 0 || !given.IsNil() && !c.ownMemoryOnly():
		return given, nil
	case given.IsNil() && c.ownWorkspaces:
		return given, noWorkspace(op, need)
	case !given.IsNil() && given.Numel() < need:
		return given, checkSize(op, "workspace", given, need)
	}
	if m.buffer == nil || m.buffer.Bytes() < need {
		b, err := c.dev.Alloc(need)
		if err != nil {
			return given,
				status.Errorf(status.Of(err),
					"%s: cannot allocate %d bytes of workspace: %w; give a workspace, or start less at a time", op,
					need, err)
		}
		if m.buffer != nil && c.ownMemoryOnly() {
			c.gpu.retired = append(c.gpu.retired, m.buffer)
		} else {
			m.free()
		}
		m.buffer = b
	}
	return c.byteTensor(m.buffer.Pointer(), m.buffer.Bytes()), nil
}

// asyncError returns the first error that occurred on the GPU after a call had returned, without
// waiting for the GPU.
func (c *context) asyncError() error {
	g := c.gpu
	if g == nil {
		return nil // the CPU's work is complete when a call returns
	}
	if g.asyncErr != nil {
		return g.asyncErr
	}
	err := cuda.Failure(c.stream)
	if m, ok := c.comm.(*cuda.Comm); ok && err == nil {
		err = m.Failure()
	}
	if err != nil {
		g.asyncErr = status.Errorf(status.Of(err), "ulysses_context_async_error: %w", err)
	}
	return g.asyncErr
}

// release waits for the context's work and frees its memory, its communicator and its device. The
// communicator is closed before memory is freed, because peers may read this memory until then.
// Collective.
func (c *context) release() error {
	if c.stream != nil {
		c.stream.Close()
	}
	err := c.comm.Close()
	if c.ownWorkspace != nil {
		c.ownWorkspace.Free()
	}
	for _, r := range c.requests {
		r.memory.free()
	}
	for _, x := range c.passes {
		x.memory.free()
	}
	if c.gpu != nil {
		for _, b := range c.gpu.retired {
			b.Free()
		}
		if c.gpu.external != nil {
			c.gpu.external.Close()
		}
	}
	if c.dev != nil {
		c.dev.Close()
	}
	return err
}

// byteTensor returns n bytes at p, on the context's device, as a tensor.
func (c *context) byteTensor(p unsafe.Pointer, n int64) tensor.Tensor {
	t := tensor.Of(p, tensor.U8, n)
	t.Where = c.dev.Info().Place
	return t
}
