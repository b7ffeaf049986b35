package main

import "sync"

// kind is what a handle stands for.
type kind uint8

const (
	aContext kind = iota + 1
	aPlan
	aBatch
	aRequest
)

var kindNames = [...]string{"nothing", "context", "plan", "batch", "request"}

// A handle is a place in this table, the kind, and how often the place has been used:
// generation<<32 | place<<8 | kind<<4. It is never followed as a pointer, so a stale or invented
// one is found out.
var handles struct {
	sync.RWMutex
	slots []slot
	free  []uint32
}

type slot struct {
	object     any // nil = free
	generation uint32
	kind       kind
}

const (
	kindShift, placeShift, generationShift = 4, 8, 32
	maxPlaces                              = 1 << (generationShift - placeShift)
)

// register gives an object a handle.
func register(k kind, object any) (uintptr, error) {
	handles.Lock()
	defer handles.Unlock()
	var place uint32
	if n := len(handles.free); n > 0 {
		place, handles.free = handles.free[n-1], handles.free[:n-1]
	} else if len(handles.slots) < maxPlaces {
		place = uint32(len(handles.slots))
		handles.slots = append(handles.slots, slot{})
	} else {
		return 0, invalid("%d handles are open: destroy what is not used any more", maxPlaces)
	}
	s := &handles.slots[place]
	s.generation++
	s.object, s.kind = object, k
	return uintptr(s.generation)<<generationShift | uintptr(place)<<placeShift | uintptr(k)<<kindShift, nil
}

// find is the object of a handle; op starts the text of an error.
func find[T any](op string, k kind, h uintptr) (*T, error) {
	if h == 0 {
		return nil, invalid("%s: the %s is NULL", op, kindNames[k])
	}
	place := h >> placeShift & (maxPlaces - 1)
	handles.RLock()
	defer handles.RUnlock()
	if place < uintptr(len(handles.slots)) && h&(1<<kindShift-1) == 0 {
		s := &handles.slots[place]
		if s.object != nil && s.kind == k && uintptr(s.generation) == h>>generationShift && uintptr(k) == h>>kindShift&15 {
			return s.object.(*T), nil
		}
	}
	return nil, invalid("%s: no %s has the handle %#x: it was destroyed, or is a handle of another kind", op, kindNames[k], h)
}

// forget ends a handle.
func forget(h uintptr) {
	handles.Lock()
	defer handles.Unlock()
	place := h >> placeShift & (maxPlaces - 1)
	handles.slots[place].object = nil
	if handles.slots[place].generation < 1<<31 { // a place that is used up is not used again
		handles.free = append(handles.free, uint32(place))
	}
}
