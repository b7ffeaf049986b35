package cuda

/*
#include "bridge.h"
#cgo noescape plug_memory_kind
#cgo nocallback plug_memory_kind
#cgo noescape plug_stream_query
#cgo nocallback plug_stream_query
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
)

// ExternalStream orders a stream of a device with the streams of a host program that uses CUDA
// itself. The host program's streams have no scratch, so no operation runs on them: events order
// the device's stream after and before them, and the host does not wait.
type ExternalStream struct {
	d            *Device
	external     *C.uly_stream // wraps another stream in each call
	ready, ended *event
}

// NewExternalStream returns an ExternalStream without a stream. Close must be called.
func (d *Device) NewExternalStream() (*ExternalStream, error) {
	if err := d.usable("NewExternalStream"); err != nil {
		return nil, err
	}
	g := &ExternalStream{d: d}
	code := C.plug_stream_wrap(d.table, d.d, 0, &g.external)
	if code != 0 {
		return nil, d.failed(code)
	}
	d.live++
	var err error
	if g.ready, err = d.newEvent(false); err == nil {
		g.ended, err = d.newEvent(false)
	}
	if err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// Enter makes later work of s wait for the work that the external cudaStream_t has now. 0 is the
// legacy default stream, 2 the stream of the thread.
func (g *ExternalStream) Enter(external uintptr, s device.Stream) error {
	d := g.d
	own, err := d.of("ExternalStream.Enter", s)
	if err != nil {
		return err
	}
	if err := d.result(C.plug_stream_wrap(d.table, d.d, C.uintptr_t(external), &g.external)); err != nil {
		return err
	}
	if err := d.result(C.plug_event_record(d.table, d.d, g.ready.e, g.external)); err != nil {
		return status.Errorf(status.Of(err), "stream %#x of the host program: %w", external, err)
	}
	return own.Wait(g.ready)
}

// Leave makes later work of the external stream wait for the work that s has now.
func (g *ExternalStream) Leave(external uintptr, s device.Stream) error {
	d := g.d
	if err := s.Record(g.ended); err != nil {
		return err
	}
	if err := d.result(C.plug_stream_wrap(d.table, d.d, C.uintptr_t(external), &g.external)); err != nil {
		return err
	}
	return d.result(C.plug_stream_wait(d.table, d.d, g.external, g.ended.e))
}

// MemoryKind says where memory lies.
type MemoryKind int32

const (
	HostMemory    MemoryKind = C.ULY_MEMORY_HOST
	PinnedMemory  MemoryKind = C.ULY_MEMORY_PINNED // host memory that CUDA has pinned or registered
	GPUMemory     MemoryKind = C.ULY_MEMORY_GPU
	ManagedMemory MemoryKind = C.ULY_MEMORY_MANAGED // managed memory
)

// MemoryKindOf returns where an address lies, and the ordinal of its GPU, or -1 for host memory.
func (g *ExternalStream) MemoryKindOf(p unsafe.Pointer) (MemoryKind, int, error) {
	var kind, ordinal C.int32_t
	if code := C.plug_memory_kind(g.d.table, g.d.d, C.uintptr_t(uintptr(p)), &kind, &ordinal); code != 0 {
		return HostMemory, -1, g.d.failed(code)
	}
	return MemoryKind(kind), int(ordinal), nil
}

// SaveContext returns the CUDA context of the calling thread, which calls of a device change.
// RestoreContext makes it current again and must run on the same thread.
func (d *Device) SaveContext() uintptr          { return uintptr(C.plug_thread_save(d.table)) }
func (d *Device) RestoreContext(thread uintptr) { C.plug_thread_restore(d.table, C.uintptr_t(thread)) }

// Close frees the events. Work that has been ordered stays ordered.
func (g *ExternalStream) Close() {
	if g.external == nil {
		return
	}
	for _, e := range []*event{g.ready, g.ended} {
		if e != nil {
			e.Close()
		}
	}
	C.plug_stream_destroy(g.d.table, g.d.d, g.external)
	g.external = nil
	g.d.ended()
}

// Failure returns the error of a stream since its creation, without waiting for the stream.
func Failure(s device.Stream) error {
	own, ok := s.(*stream)
	if !ok {
		return nil
	}
	if _, err := own.d.of("Failure", s); err != nil {
		return err
	}
	_, err := own.isComplete()
	return err
}

// isComplete reports whether all work of the stream has completed, without waiting for it.
func (s *stream) isComplete() (bool, error) {
	var done C.int32_t
	err := s.d.result(C.plug_stream_query(s.d.table, s.d.d, s.s, &done))
	return done != 0, err
}

// Maps reports whether ranks in other processes map this rank's send buffers. They keep such memory
// mapped until the communicator is closed; it must not be freed before.
func (c *Comm) Maps() bool {
	k, ok := c.transport.(*ipc)
	if !ok {
		return false
	}
	for _, p := range k.peers {
		if !p.sameProcess {
			return true
		}
	}
	return false
}

// Failure returns the error of the communicator's work so far, without waiting for it.
func (c *Comm) Failure() error {
	if f, ok := c.transport.(interface{ failure() error }); ok {
		return f.failure()
	}
	return nil
}

func (c *nccl) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.checkAsync()
}
