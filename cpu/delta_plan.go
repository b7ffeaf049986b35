package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// deltaLayout is how one call of the gated delta rule is cut up and where things lie in its memory.
// Everything but the amount of scratch depends on shapes and documents alone.
type deltaLayout struct {
	chunk           int64
	documents, runs int64 // that are not empty; tasks of a head
	states          int64 // saved ones of a head
	atRuns          int64 // bytes from the start of the workspace, as are those below
	atKeyHead       int64
	atFirst         int64
	atScratch       int64
	atWaiting       int64
	// backward's tasks are value heads, for want of key heads or, in BF16, to round their sum once
	apart         bool
	savedFloats   int64 // of a head
	scratchFloats int64 // of a worker
	bytes         int64
}

// deltaChunk is the tokens of a chunk. Speed is about the same from 32 to 64; the triangles of 32
// round half as much, those of 64 save half the states.
func deltaChunk(asked int64) int64 {
	if asked <= 0 {
		return 32
	}
	return min(asked, C.DELTA_C)
}

// layDelta cuts up a call. With memory nil it only measures; else it fills the tables at the start
// of the workspace. Cu nil: as many documents as tokens, and as many states as one document has,
// which has most. sums: the gradients of a key head's value heads are added up.
func (d *Device) layDelta(a *device.GatedDelta, scratch int64, sums bool, memory unsafe.Pointer) deltaLayout {
	l := deltaLayout{chunk: deltaChunk(a.Chunk), scratchFloats: scratch}
	tokens, heads, keyHeads := a.V.Shape[0], a.V.Shape[1], a.K.Shape[1]
	dk, dv := a.K.Shape[2], a.V.Shape[2]
	if a.Cu == nil {
		l.documents, l.runs, l.states = tokens, tokens, tokens/l.chunk
	} else {
		l.cutDelta(a.Cu, nil)
	}
	l.savedFloats = tokens*int64(C.delta_ld(C.int64_t(dv))) + l.states*dk*int64(C.delta_pad(C.int64_t(dv)))
	l.atRuns = padded(l.documents * C.sizeof_delta_document)
	l.atKeyHead = l.atRuns + padded((l.runs+1)*8)
	l.atFirst = l.atKeyHead + padded(heads*8)
	l.atScratch = l.atFirst + padded((keyHeads+1)*8)
	l.atWaiting = l.atScratch + padded(int64(d.workers)*l.scratchFloats*4)
	l.bytes = l.atWaiting
	if second := heads - usedKeyHeads(a.KeyHead, heads, keyHeads); sums && second > 0 {
		least, most := l.runs, l.runs
		if a.Cu == nil { // more runs than that keep all busy
			least, most = 1, 4*int64(d.workers)
		}
		l.apart = a.K.DType == tensor.BF16
		for runs := least; runs <= most; runs++ {
			l.apart = l.apart || idle(keyHeads*runs, int64(d.workers))
		}
		if l.apart {
			l.bytes += padded(second * 2 * tokens * dk * a.K.DType.Size())
		}
	}
	if memory != nil {
		l.cutDelta(a.Cu, memory)
		layKeyHeads(unsafe.Add(memory, l.atKeyHead), unsafe.Add(memory, l.atFirst), a.KeyHead, heads, keyHeads)
	}
	return l
}

// cutDelta counts documents, runs of them and states, and writes them down where there is memory.
func (l *deltaLayout) cutDelta(cu []int64, memory unsafe.Pointer) {
	l.documents, l.runs, l.states = 0, 0, 0
	room := int64(0) // tokens that the last run takes yet
	for i := 0; i+1 < len(cu); i++ {
		n := cu[i+1] - cu[i]
		if n == 0 {
			continue
		}
		if n > room {
			if memory != nil {
				*index[int64](unsafe.Add(memory, l.atRuns), l.runs) = l.documents
			}
			l.runs++
			room = C.DELTA_RUN
		}
		room -= n
		if memory != nil {
			*index[C.delta_document](memory, l.documents) = C.delta_document{t0: C.int64_t(cu[i]), t1: C.int64_t(cu[i+1]), index: C.int64_t(i), states: C.int64_t(l.states)}
		}
		l.documents++
		l.states += (n - 1) / l.chunk
	}
	if memory != nil {
		*index[int64](unsafe.Add(memory, l.atRuns), l.runs) = l.documents
	}
}

// idle reports whether a quarter of the workers' time or more would be lost with so few tasks.
func idle(tasks, workers int64) bool {
	return 4*tasks <= 3*workers*ceilDiv(tasks, workers) && tasks > 0
}

// usedKeyHeads counts those that have a value head.
func usedKeyHeads(table []int64, heads, keyHeads int64) (n int64) {
	for h := range heads {
		if h == 0 || deltaKeyHead(table, h, heads, keyHeads) != deltaKeyHead(table, h-1, heads, keyHeads) {
			n++
		}
	}
	return n
}

// layKeyHeads writes the two tables that pair value heads with key heads.
func layKeyHeads(of, first unsafe.Pointer, keyHead []int64, heads, keyHeads int64) {
	next := int64(0)
	for h := range heads {
		g := deltaKeyHead(keyHead, h, heads, keyHeads)
		*index[int64](of, h) = g
		for ; next <= g; next++ {
			*index[int64](first, next) = h
		}
	}
	for ; next <= keyHeads; next++ {
		*index[int64](first, next) = heads
	}
}

// deltaKeyHead is the key head of a value head.
func deltaKeyHead(table []int64, h, heads, keyHeads int64) int64 {
	if table != nil {
		return table[h]
	}
	return h / (heads / keyHeads)
}

// GatedDeltaSizes: saved are the corrections of every token and head, Dv floats each, and for every
// chunk but a document's first the state before it; Dv is rounded up to whole panels. Workspace is
// tables of the documents and scratch for each worker.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	dk, dv := C.int64_t(a.K.Shape[2]), C.int64_t(a.V.Shape[2])
	l := d.layDelta(a, int64(C.delta_forward_floats(dk, dv, isBF16(a.K.DType))), false, nil)
	return device.DeltaSizes{
		Saved:    padded(a.V.Shape[1] * l.savedFloats * 4),
		Forward:  l.bytes,
		Backward: d.layDelta(a, int64(C.delta_backward_floats(dk, dv)), true, nil).bytes,
		State:    d.layDelta(a, int64(C.delta_state_floats(dk, dv)), false, nil).bytes,
	}
}
