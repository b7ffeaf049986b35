package cuda

/*
#include "bridge.h"
#cgo noescape plug_place_of
#cgo nocallback plug_place_of
#cgo noescape plug_stream_query
#cgo nocallback plug_stream_query
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
)

// Guest is a device's place in a program that uses CUDA itself, with streams and memory of its own.
// No operation runs on the program's streams, which have no scratch: the device's stream is ordered
// behind them and before them by events, and the host waits for nothing.
type Guest struct {
	d            *Device
	theirs       *C.uly_stream // what it wraps changes from call to call
	ready, ended *event
}

// NewGuest makes one.
func (d *Device) NewGuest() (*Guest, error) {
	if err := d.usable("NewGuest"); err != nil {
		return nil, err
	}
	g := &Guest{d: d}
	code := C.plug_stream_wrap(d.table, d.d, 0, &g.theirs)
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

// Enter orders what comes later on s behind what the program's cudaStream_t holds: 0 its legacy
// default stream, 2 the thread's own.
func (g *Guest) Enter(theirs uintptr, s device.Stream) error {
	d := g.d
	own, err := d.of("Guest.Enter", s)
	if err != nil {
		return err
	}
	if err := d.result(C.plug_stream_wrap(d.table, d.d, C.uintptr_t(theirs), &g.theirs)); err != nil {
		return err
	}
	if err := d.result(C.plug_event_record(d.table, d.d, g.ready.e, g.theirs)); err != nil {
		return status.Errorf(status.Of(err), "the program's stream %#x: %w", theirs, err)
	}
	return own.Wait(g.ready)
}

// Leave orders what comes later on the program's stream behind what s holds.
func (g *Guest) Leave(theirs uintptr, s device.Stream) error {
	d := g.d
	if err := s.Record(g.ended); err != nil {
		return err
	}
	if err := d.result(C.plug_stream_wrap(d.table, d.d, C.uintptr_t(theirs), &g.theirs)); err != nil {
		return err
	}
	return d.result(C.plug_stream_wait(d.table, d.d, g.theirs, g.ended.e))
}

// Place is where a program's memory lies.
type Place int32

const (
	AtHost   Place = C.ULY_AT_HOST
	AtPinned Place = C.ULY_AT_PINNED // the host's, known to CUDA
	AtGPU    Place = C.ULY_AT_GPU
	AtEither Place = C.ULY_AT_EITHER // managed
)

// PlaceOf says where an address lies, and on which GPU (-1: none).
func (g *Guest) PlaceOf(p unsafe.Pointer) (Place, int, error) {
	var place, ordinal C.int32_t
	if code := C.plug_place_of(g.d.table, g.d.d, C.uintptr_t(uintptr(p)), &place, &ordinal); code != 0 {
		return AtHost, -1, g.d.failed(code)
	}
	return Place(place), int(ordinal), nil
}

// Thread is what the calling thread computes on, which calls of a device change; Back makes it so
// again, on the same thread.
func (d *Device) Thread() uintptr     { return uintptr(C.plug_thread_save(d.table)) }
func (d *Device) Back(thread uintptr) { C.plug_thread_restore(d.table, C.uintptr_t(thread)) }

// Close gives it up; what has been ordered stays so.
func (g *Guest) Close() {
	if g.theirs == nil {
		return
	}
	for _, e := range []*event{g.ready, g.ended} {
		if e != nil {
			e.Close()
		}
	}
	C.plug_stream_destroy(g.d.table, g.d.d, g.theirs)
	g.theirs = nil
	g.d.ended()
}

// Failure is what went wrong on a stream since it was made, without waiting for it.
func Failure(s device.Stream) error {
	own, ok := s.(*stream)
	if !ok {
		return nil
	}
	if _, err := own.d.of("Failure", s); err != nil {
		return err
	}
	var done C.int32_t
	return own.d.result(C.plug_stream_query(own.d.table, own.d.d, own.s, &done))
}

// Maps reports that ranks in other processes read what this rank sends where it lies. They keep
// such memory mapped until the communicator is closed, and it must not be freed before.
func (c *Comm) Maps() bool {
	k, ok := c.transport.(*ipc)
	if !ok {
		return false
	}
	for _, p := range k.peers {
		if !p.here {
			return true
		}
	}
	return false
}

// Failure is what went wrong in what was moved, without waiting for it.
func (c *Comm) Failure() error {
	if f, ok := c.transport.(interface{ failure() error }); ok {
		return f.failure()
	}
	return nil
}

func (c *nccl) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sound()
}
