package main

import "sync"

// handleKind is the kind of object that a handle stands for.
type handleKind uint8

const (
	contextKind handleKind = iota + 1
	planKind
	batchKind
	requestKind
	passKind
)

var kindNames = [...]string{"nothing", "context", "plan", "batch", "request", "pass"}

// handles is the table of all objects of the process that have a handle. A handle is an integer:
// the generation of a slot, its index in the table, and the kind of object. A slot gets a new
// generation each time it is used, and handles are never dereferenced. Therefore a stale or
// invented handle is an error.
var handles struct {
	sync.RWMutex
	slots []slot
	free  []uint32 // indices
}

type slot struct {
	object     any // nil = free
	generation uint32
	kind       handleKind
}

const (
	kindShift, indexShift, generationShift = 4, 8, 32
	maxHandles                             = 1 << (generationShift - indexShift)
)

// register returns a new handle for an object.
func register(k handleKind, object any) (uintptr, error) {
	handles.Lock()
	defer handles.Unlock()
	var index uint32
	if n := len(handles.free); n > 0 {
		index, handles.free = handles.free[n-1], handles.free[:n-1]
	} else if len(handles.slots) < maxHandles {
		index = uint32(len(handles.slots))
		handles.slots = append(handles.slots, slot{})
	} else {
		return 0, invalid(
			"%d handles are in use, which is the maximum; destroy plans, batches and contexts that are not needed",
			maxHandles)
	}
	s := &handles.slots[index]
	s.generation++
	s.object, s.kind = object, k
	return uintptr(s.generation)<<generationShift | uintptr(index)<<indexShift | uintptr(k)<<kindShift, nil
}

// find returns the object of a handle. op is the C function, for the error.
func find[T any](op string, k handleKind, h uintptr) (*T, error) {
	if h == 0 {
		return nil, invalid("%s: the %s is NULL", op, kindNames[k])
	}
	index := h >> indexShift & (maxHandles - 1)
	handles.RLock()
	defer handles.RUnlock()
	if index < uintptr(len(handles.slots)) && h&(1<<kindShift-1) == 0 {
		s := &handles.slots[index]
		if s.object != nil && s.kind == k && uintptr(s.generation) == h>>generationShift &&
			uintptr(k) == h>>kindShift&15 {
			return s.object.(*T), nil
		}
	}
	return nil, invalid("%s: %#x is not the handle of a %s: it was destroyed, or it is a handle of another kind", op, h,
		kindNames[k])
}

// unregister makes a handle invalid.
func unregister(h uintptr) {
	handles.Lock()
	defer handles.Unlock()
	index := h >> indexShift & (maxHandles - 1)
	handles.slots[index].object = nil
	// a slot without unused generations is not used again
	if handles.slots[index].generation < 1<<31 {
		handles.free = append(handles.free, uint32(index))
	}
}
