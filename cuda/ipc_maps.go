package cuda

// #include "bridge.h"
import "C"

import (
	"sync"
	"unsafe"
)

// mappings has the memory of other processes that one device has mapped. All communicators of the
// device share it, because an allocation is mapped only once. A communicator keeps its mappings
// until it is closed; tensors that are moved must live as long, as arenas do.
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
	base  uintptr
	users int
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
func (c *ipc) base(process string, handle []byte) (uintptr, error) {
	key := mapping{process: process}
	copy(key.handle[:], handle)
	if at, ok := c.mapped[key]; ok {
		return at, nil
	}
	m := c.maps.at[key]
	if m == nil {
		var p unsafe.Pointer
		if err := c.d.result(C.plug_memory_open(c.d.table, c.d.d, (*C.char)(unsafe.Pointer(&handle[0])), &p)); err != nil {
			return 0, err
		}
		m = &mapped{base: address(p)}
		c.maps.at[key] = m
	}
	m.users++
	c.mapped[key] = m.base
	return m.base, nil
}

// unmap releases the mappings of this communicator and unmaps those that no other one uses.
func (c *ipc) unmap() {
	if c.maps == nil {
		return
	}
	for key := range c.mapped {
		m := c.maps.at[key]
		if m.users--; m.users == 0 {
			C.plug_memory_close(c.d.table, c.d.d, pointer(m.base))
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
