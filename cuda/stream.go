package cuda

// #include "bridge.h"
import "C"

import (
	"runtime"
	"sync"

	"ulysses/device"
	"ulysses/internal/status"
)

// stream is a CUDA stream with its scratch memory.
type stream struct {
	d    *Device
	s    *C.uly_stream  // nil after Close
	pins runtime.Pinner // Go memory that enqueued copies will write
}

// kept are the open streams. A stream that the program drops while copies are enqueued must not be
// collected: the copies still write to pinned Go memory, and the Go runtime ends a program that
// collects it.
var kept struct {
	sync.Mutex
	streams map[*stream]bool
}

func (s *stream) keep(open bool) {
	kept.Lock()
	defer kept.Unlock()
	if kept.streams == nil {
		kept.streams = map[*stream]bool{}
	}
	if open {
		kept.streams[s] = true
	} else {
		delete(kept.streams, s)
	}
}

// event is a CUDA event.
type event struct {
	d *Device
	e *C.uly_event // nil after Close
}

// NewStream creates a stream with its own scratch memory.
func (d *Device) NewStream() (device.Stream, error) {
	s, err := d.newStream(forCompute)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// streamUse says what a stream is for.
type streamUse int32

const (
	forCompute  streamUse = C.ULY_STREAM_COMPUTE
	forComm     streamUse = C.ULY_STREAM_COMM
	forPriority streamUse = C.ULY_STREAM_PRIORITY // communication that must not wait behind other communication
)

func (d *Device) newStream(use streamUse) (*stream, error) {
	if err := d.usable("NewStream"); err != nil {
		return nil, err
	}
	s := &stream{d: d}
	if code := C.plug_stream_create(d.table, d.d, C.int32_t(use), &s.s); code != 0 {
		return nil, d.failed(code)
	}
	d.live++
	s.keep(true)
	return s, nil
}

// NewEvent creates an event. Waiting for an event that was never recorded returns at once.
func (d *Device) NewEvent() (device.Event, error) {
	e, err := d.newEvent(false)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// newEvent creates an event. Other processes can open a shared event.
func (d *Device) newEvent(shared bool) (*event, error) {
	if err := d.usable("NewEvent"); err != nil {
		return nil, err
	}
	e := &event{d: d}
	if code := C.plug_event_create(d.table, d.d, flag(shared), &e.e); code != 0 {
		return nil, d.failed(code)
	}
	d.live++
	return e, nil
}

// of returns s as a stream of this device; op names the caller in errors.
func (d *Device) of(op string, s device.Stream) (*stream, error) {
	if err := d.usable(op); err != nil {
		return nil, err
	}
	own, ok := s.(*stream)
	if !ok || own.d != d {
		return nil, status.Errorf(status.InvalidArgument,
			"cuda.%s: the stream belongs to another device (%T); create one with this device's NewStream", op, s)
	}
	if own.s == nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: the stream is closed", op)
	}
	return own, nil
}

// ofEvent returns e as an event of this device; op names the caller in errors.
func (d *Device) ofEvent(op string, e device.Event) (*event, error) {
	own, ok := e.(*event)
	if !ok || own.d != d {
		return nil, status.Errorf(status.InvalidArgument,
			"cuda.%s: the event belongs to another device (%T); create one with this device's NewEvent", op, e)
	}
	if own.e == nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: the event is closed", op)
	}
	return own, nil
}

// Sync waits until all work of the stream has completed. It returns the first error since the last
// Sync.
func (s *stream) Sync() error {
	if _, err := s.d.of("Sync", s); err != nil {
		return err
	}
	code := C.plug_stream_sync(s.d.table, s.d.d, s.s)
	s.pins.Unpin()
	return s.d.result(code)
}

// Group opens or closes a group of independent operations (device.Grouper).
func (s *stream) Group(open bool) error {
	if _, err := s.d.of("Group", s); err != nil {
		return err
	}
	return s.d.result(C.plug_stream_group(s.d.table, s.d.d, s.s, flag(open)))
}

var _ device.Grouper = (*stream)(nil)

// withEvent checks that the stream and the event can be used, and returns the event.
func (s *stream) withEvent(op string, e device.Event) (*event, error) {
	if _, err := s.d.of(op, s); err != nil {
		return nil, err
	}
	return s.d.ofEvent(op, e)
}

// Record records the event in the stream.
func (s *stream) Record(e device.Event) error {
	own, err := s.withEvent("Record", e)
	if err != nil {
		return err
	}
	return s.d.result(C.plug_event_record(s.d.table, s.d.d, own.e, s.s))
}

// Wait makes later work of the stream wait for the event's last record.
func (s *stream) Wait(e device.Event) error {
	own, err := s.withEvent("Wait", e)
	if err != nil {
		return err
	}
	return s.d.result(C.plug_stream_wait(s.d.table, s.d.d, s.s, own.e))
}

// Close waits for the stream's work, which may still write host memory, and closes the stream.
func (s *stream) Close() {
	if s.s == nil {
		return
	}
	C.plug_stream_sync(s.d.table, s.d.d, s.s)
	C.plug_stream_destroy(s.d.table, s.d.d, s.s)
	s.pins.Unpin()
	s.s = nil
	s.keep(false)
	s.d.ended()
}

// Sync blocks the host until the stream has reached the event's last record.
func (e *event) Sync() error {
	if err := e.d.usable("Event.Sync"); err != nil {
		return err
	}
	if e.e == nil {
		return status.Errorf(status.InvalidArgument, "cuda.Event.Sync: the event is closed")
	}
	return e.d.result(C.plug_event_sync(e.d.table, e.d.d, e.e))
}

// Close closes the event. Streams that wait for its last record continue to wait.
func (e *event) Close() {
	if e.e == nil {
		return
	}
	C.plug_event_destroy(e.d.table, e.d.d, e.e)
	e.e = nil
	e.d.ended()
}
