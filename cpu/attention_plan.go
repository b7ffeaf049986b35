package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
)

// partFlops is the work that makes another part of the backward pass worth its partial sums. Tests
// lower it, to have parts at sizes that a reference can follow; nothing else may change it, because
// the bits of dk and dv depend on it.
var partFlops = 5e8

// attentionLayout is how one attention call is cut up and where things lie in its workspace. Blocks
// and parts depend on document lengths, mask and head sizes alone; only the amount of scratch
// depends on workers.
type attentionLayout struct {
	blocks, parts  int64 // counts
	pairs          int64 // visible query-key pairs of a head
	partialFloats  int64 // of one key head; in BF16 the first are all its dk and dv
	most           int64 // query heads of one key head, at most
	wave           int64 // key heads whose partial sums exist at a time
	group          int64 // blocks in a task of the forward pass
	scratchFloats  int64 // of one worker
	atParts        int64 // bytes from the start, as are those below
	atKVHead       int64
	atFirst        int64
	atScratch      int64
	atPartial      int64
	bytes          int64
	blocksAt       unsafe.Pointer
	partsAt, heads unsafe.Pointer
}

// blockCursor walks the query blocks of all documents in order. Blocks of a document are even, in
// steps of 16 queries.
type blockCursor struct {
	a     *device.Attention
	doc   int64
	block C.attention_block
}

func (c *blockCursor) next() bool {
	// the document goes on: its last query is k1 - shift - 1
	if c.block.q1 < c.block.k1-c.block.shift && c.doc > 0 {
		c.cut(int64(c.block.q1))
		return true
	}
	for int(c.doc)+1 < len(c.a.CuQ) {
		d := c.doc
		c.doc++
		q0, q1, k0, k1 := c.a.CuQ[d], c.a.CuQ[d+1], c.a.CuK[d], c.a.CuK[d+1]
		if q0 == q1 && k0 == k1 {
			continue
		}
		c.block = C.attention_block{k0: C.int64_t(k0), k1: C.int64_t(k1), shift: C.int64_t(k1 - q1), document: C.int64_t(d)}
		c.cut(q0)
		return true
	}
	return false
}

// cut takes the next block of the document from query row q0 on.
func (c *blockCursor) cut(q0 int64) {
	d := c.doc - 1
	c.block.q0, c.block.q1 = C.int64_t(q0), C.int64_t(min(c.a.CuQ[d+1], q0+blockRows(c.a.CuQ[d+1]-c.a.CuQ[d])))
}

// blockRows is the queries of a block, but for the last, of a document of n.
func blockRows(n int64) int64 {
	if n == 0 {
		return 0
	}
	return ceilDiv(ceilDiv(n, ceilDiv(n, C.ATT_MQ)), 16) * 16
}

// sides are how many keys a query sees on either side of where it stands; causal is none to the
// right.
func sides(a *device.Attention) (left, right int64) {
	left, right = C.ATT_UNBOUNDED, C.ATT_UNBOUNDED
	if w := a.Window; w != nil && w.Left >= 0 {
		left = min(left, w.Left)
	}
	if w := a.Window; w != nil && w.Right >= 0 {
		right = min(right, w.Right)
	}
	if a.Causal {
		right = 0
	}
	return left, right
}

// visible is the number of query-key pairs of a block that the mask leaves.
func visible(b *C.attention_block, left, right int64) int64 {
	n, keys := int64(b.q1-b.q0), int64(b.k1-b.k0)
	// where the first query stands; below, sums over queries of keys clamped to [0, keys]
	at := int64(b.q0 + b.shift - b.k0)
	upTo, before := n*keys, int64(0)
	if right < C.ATT_UNBOUNDED {
		upTo = ramp(at+right+1+n, keys) - ramp(at+right+1, keys)
	}
	if left < C.ATT_UNBOUNDED {
		before = ramp(at-left+n, keys) - ramp(at-left, keys)
	}
	return upTo - before
}

// ramp is the sum of clamp(i, 0, top) over i < n.
func ramp(n, top int64) int64 {
	if n <= 0 {
		return 0
	}
	m := min(n, top+1) // terms up to top
	return m*(m-1)/2 + (n-m)*top
}

// beginKey is the row of the first key that some query of the block sees, endKey that behind the
// last; the first key's row if there is none.
func beginKey(b *C.attention_block, left int64) int64 {
	return min(max(int64(b.k0), int64(b.q0+b.shift)-left), int64(b.k1))
}

func endKey(b *C.attention_block, right int64) int64 {
	return max(int64(b.k0), min(int64(b.k1), int64(b.q1+b.shift)+right))
}

// layAttention cuts up a call. With memory nil it only measures; else it fills the tables at the
// start of the workspace.
func (d *Device) layAttention(a *device.Attention, backward bool, memory unsafe.Pointer) attentionLayout {
	var l attentionLayout
	dim, dv, kvHeads := a.Q.Shape[2], a.V.Shape[2], a.K.Shape[1]
	left, right := sides(a)
	for c := (blockCursor{a: a}); c.next(); {
		if memory != nil {
			*index[C.attention_block](memory, l.blocks) = c.block
		}
		l.blocks++
		l.pairs += visible(&c.block, left, right)
	}
	// Enough blocks in a forward task that short documents do not drown in tasks.
	l.group = 1
	if l.pairs > 0 {
		const taskFlops = 4e6
		l.group = max(1, min(l.blocks, int64(taskFlops*float64(l.blocks)/(2*float64(l.pairs)*float64(dim+dv)))))
	}
	d.layTables(a, &l, backward)
	if backward {
		d.layParts(a, &l, memory)
	}
	l.wave = kvHeads
	if l.partialFloats > 0 {
		l.wave = waveOf(kvHeads, int64(d.workers), l.parts)
	}
	l.bytes = l.atPartial + padded(l.wave*l.partialFloats*4)
	return l
}

// layTables places what lies before the partial sums: tables of so many blocks, and scratch.
func (d *Device) layTables(a *device.Attention, l *attentionLayout, backward bool) {
	dim, dv, kvHeads := a.Q.Shape[2], a.V.Shape[2], a.K.Shape[1]
	l.atParts = padded(l.blocks * C.sizeof_attention_block)
	l.atKVHead = l.atParts + padded(C.ATT_PARTS*C.sizeof_attention_part)
	l.atFirst = l.atKVHead + padded(a.Q.Shape[1]*8)
	l.atScratch = l.atFirst + padded((kvHeads+1)*8)
	l.scratchFloats = int64(C.attention_forward_floats(C.int64_t(dim), C.int64_t(dv), isBF16(a.Q.DType)))
	if backward {
		l.most = largestGroup(a)
		grouped := C.int64_t(0)
		if l.most > 1 {
			grouped = 1
		}
		l.scratchFloats = int64(C.attention_backward_floats(C.int64_t(dim), C.int64_t(dv), isBF16(a.Q.DType), grouped))
	}
	l.atPartial = l.atScratch + padded(int64(d.workers)*l.scratchFloats*4)
}

// partsFor is how many parts the backward pass of a key head is split into.
func partsFor(pairs float64, dim, dv int64) int64 {
	return max(1, int64(min(C.ATT_PARTS, pairs*float64(6*dim+4*dv)/partFlops)))
}

// waveOf is how many key heads have their partial sums in memory at a time.
func waveOf(kvHeads, workers, parts int64) int64 { return min(kvHeads, ceilDiv(4*workers, parts)) }

// layParts splits the blocks into parts of about equal work.
func (d *Device) layParts(a *device.Attention, l *attentionLayout, memory unsafe.Pointer) {
	left, right := sides(a)
	want := partsFor(float64(l.pairs), a.Q.Shape[2], a.V.Shape[2])
	bf16 := isBF16(a.Q.DType) != 0
	if bf16 {
		l.partialFloats = a.K.Shape[0] * (a.Q.Shape[2] + a.V.Shape[2])
	}
	take := func(k0, k1 int64) (from, to, offset C.int64_t) { // a partial sum of these keys
		offset = C.int64_t(l.partialFloats)
		l.partialFloats += (k1 - k0) * (a.Q.Shape[2] + a.V.Shape[2])
		return C.int64_t(k0), C.int64_t(k1), offset
	}
	var part C.attention_part
	began := int64(0) // the part in which the document at hand began
	document, from := C.int64_t(-1), int64(0)
	done, i := int64(0), int64(0)
	c := blockCursor{a: a}
	for more := c.next(); more; {
		b := c.block
		if b.document != document {
			document, began = b.document, l.parts
			from = beginKey(&b, left)
		} else if C.int64_t(i) == part.b0 {
			from = beginKey(&b, left)
		}
		i++
		done += visible(&b, left, right)
		more = c.next()
		goesOn := more && c.block.document == document
		if !goesOn && began < l.parts && l.most > 1 && !bf16 {
			part.t0, part.t1, part.tail = take(from, max(from, endKey(&b, right)))
		}
		if more && float64(done) < float64(l.pairs)*float64(l.parts+1)/float64(want) {
			continue
		}
		if part.b1 = C.int64_t(i); goesOn {
			part.k0, part.k1, part.offset = take(from, max(from, endKey(&b, right)))
		}
		if memory != nil {
			*index[C.attention_part](unsafe.Add(memory, l.atParts), l.parts) = part
		}
		l.parts++
		part = C.attention_part{b0: part.b1}
	}
}

// layHeads writes the two tables that pair query heads with key heads.
func layHeads(a *device.Attention, l *attentionLayout, memory unsafe.Pointer) {
	heads, kvHeads := a.Q.Shape[1], a.K.Shape[1]
	kv, first := unsafe.Add(memory, l.atKVHead), unsafe.Add(memory, l.atFirst)
	next := int64(0)
	for h := range heads {
		g := kvHead(a, h)
		*index[int64](kv, h) = g
		for ; next <= g; next++ {
			*index[int64](first, next) = h
		}
	}
	for ; next <= kvHeads; next++ {
		*index[int64](first, next) = heads
	}
}

// largestGroup is the most query heads that one key head serves.
func largestGroup(a *device.Attention) (most int64) {
	n := int64(0)
	for h := range a.Q.Shape[1] {
		if n++; h > 0 && kvHead(a, h) != kvHead(a, h-1) {
			n = 1
		}
		most = max(most, n)
	}
	return most
}

// kvHead is the key head of a query head.
func kvHead(a *device.Attention, h int64) int64 {
	if a.KVHead != nil {
		return a.KVHead[h]
	}
	return h / (a.Q.Shape[1] / a.K.Shape[1])
}

func padded(n int64) int64 { return (n + align - 1) / align * align }

func index[T any](p unsafe.Pointer, i int64) *T {
	var t T
	return (*T)(unsafe.Add(p, i*int64(unsafe.Sizeof(t))))
}
