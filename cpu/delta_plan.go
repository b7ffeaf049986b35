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

// deltaLayout is the division of one call of the gated delta rule into tasks, and the layout of its
// workspace, which starts with the table of documents. Everything but the amount of scratch and
// byValueHead depends on shapes and documents alone.
type deltaLayout struct {
	chunk             int64 // tokens
	documents, groups int64 // documents with tokens; groups of documents, the tasks of a head
	states            int64 // saved states of a head
	// offsets in the workspace, in bytes
	groupsOffset, keyHeadOffset, firstOffset, scratchOffset, extraOffset int64
	// The tasks of the backward pass are value heads, because there are too few key heads for the
	// workers, or, in BF16, so that the sum over value heads is rounded once.
	byValueHead   bool
	savedFloats   int64 // of a head
	scratchFloats int64 // of a worker
	bytes         int64 // of the workspace
}

// deltaChunk returns the number of tokens of a chunk if the caller wants `wanted`; 0 = the default.
// The speed is about the same from 32 to 64. Chunks of 32 have half the rounding errors in their
// triangles; chunks of 64 save half as many states.
func deltaChunk(wanted int64) int64 {
	if wanted <= 0 {
		return 32
	}
	return min(wanted, C.DELTA_C)
}

// planDelta returns the layout of a call. If memory is not nil, it also writes the tables to the
// workspace. If Cu is nil, the layout is the largest of any documents: one document for each token,
// and the states of one long document. sums: the gradients of a key head's value heads are added.
func (d *Device) planDelta(a *device.GatedDelta, scratch int64, sums bool, memory unsafe.Pointer) deltaLayout {
	l := deltaLayout{chunk: deltaChunk(a.Chunk), scratchFloats: scratch}
	tokens, heads, keyHeads := a.V.Shape[0], a.V.Shape[1], a.K.Shape[1]
	dk, dv := a.K.Shape[2], a.V.Shape[2]
	if a.Cu == nil {
		l.documents, l.groups, l.states = tokens, tokens, tokens/l.chunk
	} else {
		l.divideDocuments(a.Cu, nil)
	}
	l.savedFloats = tokens*int64(C.delta_ld(C.int64_t(dv))) + l.states*dk*int64(C.delta_pad(C.int64_t(dv)))
	l.groupsOffset = padded(l.documents * C.sizeof_delta_document)
	l.keyHeadOffset = l.groupsOffset + padded((l.groups+1)*8)
	l.firstOffset = l.keyHeadOffset + padded(heads*8)
	l.scratchOffset = l.firstOffset + padded((keyHeads+1)*8)
	l.extraOffset = l.scratchOffset + padded(int64(d.workers)*l.scratchFloats*4)
	l.bytes = l.extraOffset
	if second := heads - usedKeyHeads(a.KeyHead, heads, keyHeads); sums && second > 0 {
		least, most := l.groups, l.groups
		if a.Cu == nil { // with more groups no worker is idle
			least, most = 1, 4*int64(d.workers)
		}
		l.byValueHead = a.K.DType == tensor.BF16
		for groups := least; groups <= most; groups++ {
			l.byValueHead = l.byValueHead || idle(keyHeads*groups, int64(d.workers))
		}
		if l.byValueHead {
			l.bytes += padded(second * 2 * tokens * dk * a.K.DType.Size())
		}
	}
	if memory != nil {
		l.divideDocuments(a.Cu, memory)
		writeHeadTables(unsafe.Add(memory, l.keyHeadOffset), unsafe.Add(memory, l.firstOffset), a.KeyHead, heads,
			keyHeads)
	}
	return l
}

// divideDocuments counts documents with tokens, their groups and their saved states. If memory is
// not nil, it writes the tables of documents and groups.
func (l *deltaLayout) divideDocuments(cu []int64, memory unsafe.Pointer) {
	l.documents, l.groups, l.states = 0, 0, 0
	room := int64(0) // tokens that fit in the last group
	for i := 0; i+1 < len(cu); i++ {
		n := cu[i+1] - cu[i]
		if n == 0 {
			continue
		}
		if n > room {
			if memory != nil {
				*index[int64](unsafe.Add(memory, l.groupsOffset), l.groups) = l.documents
			}
			l.groups++
			room = C.DELTA_GROUP
		}
		room -= n
		if memory != nil {
			*index[C.delta_document](memory, l.documents) = C.delta_document{t0: C.int64_t(cu[i]),
				t1: C.int64_t(cu[i+1]), index: C.int64_t(i), states: C.int64_t(l.states)}
		}
		l.documents++
		l.states += (n - 1) / l.chunk
	}
	if memory != nil {
		*index[int64](unsafe.Add(memory, l.groupsOffset), l.groups) = l.documents
	}
}

// idle reports whether workers would be idle for a quarter of the time or more with that many
// tasks.
func idle(tasks, workers int64) bool {
	return 4*tasks <= 3*workers*ceilDiv(tasks, workers) && tasks > 0
}

// usedKeyHeads returns the number of key heads that have a value head.
func usedKeyHeads(table []int64, heads, keyHeads int64) (n int64) {
	for h := range heads {
		if h == 0 || keyHeadOf(table, h, heads, keyHeads) != keyHeadOf(table, h-1, heads, keyHeads) {
			n++
		}
	}
	return n
}

// GatedDeltaSizes returns the bytes of saved activations and of the workspaces. Saved are the
// corrections of each token and head, Dv floats, and the state before each chunk but a document's
// first, Dk·Dv floats; Dv is rounded up to whole panels. A workspace holds tables of the documents
// and scratch for each worker.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	dk, dv := C.int64_t(a.K.Shape[2]), C.int64_t(a.V.Shape[2])
	l := d.planDelta(a, int64(C.delta_forward_floats(dk, dv, isBF16(a.K.DType))), false, nil)
	return device.DeltaSizes{
		Saved:    padded(a.V.Shape[1] * l.savedFloats * 4),
		Forward:  l.bytes,
		Backward: d.planDelta(a, int64(C.delta_backward_floats(dk, dv)), true, nil).bytes,
		State:    d.planDelta(a, int64(C.delta_state_floats(dk, dv)), false, nil).bytes,
	}
}
