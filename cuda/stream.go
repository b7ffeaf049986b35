package cuda

// #include "bridge.h"
import "C"

import (
	"runtime"
	"sync"

	"ulysses/device"
	"ulysses/internal/status"
)

// stream is an order of execution on a GPU.
type stream struct {
	d    *Device
	s    *C.uly_stream  // nil once closed
	pins runtime.Pinner // Go memory that copies in the stream will write
}

// kept are the streams that are not closed. One that is dropped with copies in it must not be
// collected: they still write, and the runtime ends a program that loses what it has pinned.
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

// event is a mark in a stream's order.
type event struct {
	d *Device
	e *C.uly_event // nil once closed
}

// NewStream makes a stream, with a scratch of its own.
func (d *Device) NewStream() (device.Stream, error) {
	s, err := d.newStream()
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (d *Device) newStream() (*stream, error) {
	if err := d.usable("NewStream"); err != nil {
		return nil, err
	}
	s := &stream{d: d}
	if code := C.plug_stream_create(d.table, d.d, &s.s); code != 0 {
		return nil, d.failed(code)
	}
	d.live++
	s.keep(true)
	return s, nil
}

// NewEvent makes an event, which holds nobody up before it is recorded.
func (d *Device) NewEvent() (device.Event, error) {
	e, err := d.newEvent(false)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// newEvent makes an event; a shared one may be handed to another process.
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

// of is the stream as this device's own; op names the caller.
func (d *Device) of(op string, s device.Stream) (*stream, error) {
	if err := d.usable(op); err != nil {
		return nil, err
	}
	own, ok := s.(*stream)
	if !ok || own.d != d {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: a stream of another device (%T): use one of this device's NewStream", op, s)
	}
	if own.s == nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: the stream is closed", op)
	}
	return own, nil
}

// ofEvent is the event as this device's own.
func (d *Device) ofEvent(op string, e device.Event) (*event, error) {
	own, ok := e.(*event)
	if !ok || own.d != d {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: an event of another device (%T): use one of this device's NewEvent", op, e)
	}
	if own.e == nil {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: the event is closed", op)
	}
	return own, nil
}

// Sync waits until everything in the stream has run, and says what went wrong meanwhile.
func (s *stream) Sync() error {
	if _, err := s.d.of("Sync", s); err != nil {
		return err
	}
	code := C.plug_stream_sync(s.d.table, s.d.d, s.s)
	s.pins.Unpin()
	return s.d.result(code)
}

// Record puts a mark into the stream.
func (s *stream) Record(e device.Event) error {
	if _, err := s.d.of("Record", s); err != nil {
		return err
	}
	own, err := s.d.ofEvent("Record", e)
	if err != nil {
		return err
	}
	return s.d.result(C.plug_event_record(s.d.table, s.d.d, own.e, s.s))
}

// Wait makes what is enqueued from here on wait for the event's last mark.
func (s *stream) Wait(e device.Event) error {
	if _, err := s.d.of("Wait", s); err != nil {
		return err
	}
	own, err := s.d.ofEvent("Wait", e)
	if err != nil {
		return err
	}
	return s.d.result(C.plug_stream_wait(s.d.table, s.d.d, s.s, own.e))
}

// Close waits for what the stream holds, because it may still write host memory, and closes it.
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

// Sync makes the host wait for the last mark.
func (e *event) Sync() error {
	if err := e.d.usable("Event.Sync"); err != nil {
		return err
	}
	if e.e == nil {
		return status.Errorf(status.InvalidArgument, "cuda.Event.Sync: the event is closed")
	}
	return e.d.result(C.plug_event_sync(e.d.table, e.d.d, e.e))
}

// Close closes the event; streams that wait for its last mark go on doing so.
func (e *event) Close() {
	if e.e == nil {
		return
	}
	C.plug_event_destroy(e.d.table, e.d.d, e.e)
	e.e = nil
	e.d.ended()
}
