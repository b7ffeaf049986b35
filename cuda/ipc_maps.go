package cuda

// #include "bridge.h"
import "C"

import (
	"sync"
	"unsafe"
)

// mappings has the memory of other processes that one device has mapped. All communicators of the
// device share it, because an allocation is mapped only once. A communicator keeps its mappings
// until it is closed. Memory of another process that is freed and allocated again may have the same
// handle as before, but a map of the old memory shows the old pages. Its generation, which packets
// contain, then differs, and it is mapped again.
type mappings struct {
	d     *Device
	users int
	at    map[mapping]*mapped
}

type mapping struct {
	process string
	handle  [handleBytes]byte
}

type mapped struct {
	base       uintptr // 0: it could not be mapped again
	generation uint64
	users      int // communicators
}

// exported identifies the memory at an address for other processes, together with the handle of its
// allocation.
type exported struct {
	offset     int64 // into the allocation
	generation uint64
}

// exportMemory writes the handle of the allocation that contains p.
func (d *Device) exportMemory(p unsafe.Pointer, handle []byte) (exported, error) {
	var offset C.int64_t
	var generation C.uint64_t
	err := d.result(C.plug_memory_handle(d.table, d.d, p, (*C.char)(unsafe.Pointer(&handle[0])), &offset, &generation))
	return exported{int64(offset), uint64(generation)}, err
}

var deviceMappings = struct {
	sync.Mutex
	by map[*Device]*mappings
}{by: map[*Device]*mappings{}}

func mappingsOf(d *Device) *mappings {
	deviceMappings.Lock()
	defer deviceMappings.Unlock()
	m := deviceMappings.by[d]
	if m == nil {
		m = &mappings{d: d, at: map[mapping]*mapped{}}
		deviceMappings.by[d] = m
	}
	m.users++
	return m
}

// base returns the address at which the allocation of a handle is mapped. It maps the allocation if
// necessary.
func (c *ipc) base(process string, handle []byte, generation uint64) (uintptr, error) {
	key := mapping{process: process}
	copy(key.handle[:], handle)
	m := c.mapped[key]
	if m == nil {
		if m = c.maps.at[key]; m == nil {
			m = &mapped{}
			c.maps.at[key] = m
		}
		m.users++
		c.mapped[key] = m
	}
	if m.base != 0 && m.generation == generation {
		return m.base, nil
	}
	if err := c.unmapOld(m); err != nil {
		return 0, err
	}
	var p unsafe.Pointer
	if err := c.d.result(C.plug_memory_open(c.d.table, c.d.d, (*C.char)(unsafe.Pointer(&handle[0])), &p)); err != nil {
		return 0, err
	}
	m.base, m.generation = address(p), generation
	return m.base, nil
}

// unmapOld unmaps memory whose owner has freed it. The owner has waited for all ranks to read it;
// what is enqueued on the communication stream is waited for in any case.
func (c *ipc) unmapOld(m *mapped) error {
	if m.base == 0 {
		return nil
	}
	if err := c.s.Sync(); err != nil {
		return err
	}
	return c.closeMap(m)
}

// closeMap unmaps memory, if it is mapped.
func (c *ipc) closeMap(m *mapped) error {
	if m.base == 0 {
		return nil
	}
	base := m.base
	m.base = 0
	return c.d.result(C.plug_memory_close(c.d.table, c.d.d, pointer(base)))
}

// unmap releases the mappings of this communicator and unmaps those that no other one uses.
func (c *ipc) unmap() {
	if c.maps == nil {
		return
	}
	for key, m := range c.mapped {
		if m.users--; m.users == 0 {
			c.closeMap(m)
			delete(c.maps.at, key)
		}
	}
	c.mapped = nil
	deviceMappings.Lock()
	defer deviceMappings.Unlock()
	if c.maps.users--; c.maps.users == 0 {
		delete(deviceMappings.by, c.d)
	}
	c.maps = nil
}
