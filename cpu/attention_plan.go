package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
)

// splitFlops is the number of FLOP of a split of the backward pass, at least. Tests lower it, so
// that there are several splits at sizes for which the reference is fast enough. Nothing else may
// change it, because the rounding of dk and dv depends on it.
var splitFlops = 5e8

// attentionLayout is the division of one attention call into blocks and splits, and the layout of
// its workspace, which starts with the table of blocks. Blocks and splits depend on document
// lengths, mask and head sizes alone; only the amount of scratch depends on the number of workers.
type attentionLayout struct {
	blocks, splits int64 // numbers
	pairs          int64 // visible query-key pairs of a head
	partialFloats  int64 // partial sums of one key head; in BF16 they start with all its dk and dv
	largestGroup   int64 // most query heads of one key head
	wave           int64 // key heads of a run: their partial sums are in memory at the same time
	group          int64 // blocks of a task of the forward pass
	scratchFloats  int64 // of one worker
	// offsets in the workspace, in bytes
	splitsOffset, kvHeadOffset, firstOffset, scratchOffset, partialOffset int64
	slopesOffset                                                          int64 // of the terms of dslopes; 0 = none
	bytes                                                                 int64 // of the workspace
}

// blockCursor iterates over the query blocks of all documents in order. The blocks of a document
// have equal sizes, rounded up to 16 queries. With a block mask, the same holds for the queries of
// a document that are in one row of the mask's blocks.
type blockCursor struct {
	a     *device.Attention
	doc   int64
	block C.attention_block
}

// next moves to the next block and reports whether there is one.
func (c *blockCursor) next() bool {
	if c.doc > 0 && int64(c.block.q1) < c.a.CuQ[c.doc] { // the document has more blocks
		c.setBlock(int64(c.block.q1))
		return true
	}
	for int(c.doc)+1 < len(c.a.CuQ) {
		d := c.doc
		c.doc++
		q0, q1, k0, k1 := c.a.CuQ[d], c.a.CuQ[d+1], c.a.CuK[d], c.a.CuK[d+1]
		if q0 == q1 && k0 == k1 {
			continue
		}
		shift := k1 - q1
		if c.a.Shift != nil {
			shift = c.a.Shift[d]
		}
		c.block = C.attention_block{k0: C.int64_t(k0), k1: C.int64_t(k1), shift: C.int64_t(shift),
			document: C.int64_t(d)}
		if !c.a.BlockMask.IsNil() {
			c.block.key_at = C.int64_t((c.a.KeyAt+k0)%c.a.KeySeq - k0)
		}
		c.setBlock(q0)
		return true
	}
	return false
}

// setBlock sets the queries of the document's block that starts at query row q0.
func (c *blockCursor) setBlock(q0 int64) {
	from, to := c.a.CuQ[c.doc-1], c.a.CuQ[c.doc]
	if a := c.a; !a.BlockMask.IsNil() {
		at := (a.QueryAt + q0) % a.QuerySeq
		row := at / a.BlockRows
		c.block.mask_row = C.int64_t(row)
		from, to = max(from, q0-(at-row*a.BlockRows)), min(to, q0+(row+1)*a.BlockRows-at)
	}
	c.block.q0, c.block.q1 = C.int64_t(q0), C.int64_t(min(to, q0+blockRows(to-from)))
}

// blockRows returns the number of queries of each block but the last, for a document of n queries.
func blockRows(n int64) int64 {
	if n == 0 {
		return 0
	}
	return ceilDiv(ceilDiv(n, ceilDiv(n, C.ATT_MQ)), 16) * 16
}

// visible returns the number of visible query-key pairs of a block.
func visible(b *C.attention_block, left, right int64) int64 {
	n, keys := int64(b.q1-b.q0), int64(b.k1-b.k0)
	// index in the document of the key that is aligned with the first query; below, sums over the
	// queries of numbers of keys, each clamped to [0, keys]
	at := int64(b.q0 + b.shift - b.k0)
	upTo, before := n*keys, int64(0)
	if right < device.Unbounded {
		upTo = ramp(at+right+1+n, keys) - ramp(at+right+1, keys)
	}
	if left < device.Unbounded {
		before = ramp(at-left+n, keys) - ramp(at-left, keys)
	}
	return upTo - before
}

// ramp returns the sum of clamp(i, 0, top) over i < n.
func ramp(n, top int64) int64 {
	if n <= 0 {
		return 0
	}
	m := min(n, top+1) // terms up to top
	return m*(m-1)/2 + (n-m)*top
}

// beginKey returns the row of the first key that is visible to a query of the block, endKey the row
// after the last such key, or the first row of the document if there is none.
func beginKey(b *C.attention_block, left int64) int64 {
	return min(max(int64(b.k0), int64(b.q0+b.shift)-left), int64(b.k1))
}

func endKey(b *C.attention_block, right int64) int64 {
	return max(int64(b.k0), min(int64(b.k1), int64(b.q1+b.shift)+right))
}

// planAttention returns the layout of a call. If memory is not nil, it also writes the tables of
// blocks and splits to the workspace.
func (d *Device) planAttention(a *device.Attention, backward bool, memory unsafe.Pointer) attentionLayout {
	var l attentionLayout
	dim, dv, kvHeads := a.Q.Shape[2], a.V.Shape[2], a.K.Shape[1]
	left, right := a.Window.Sides(a.Causal)
	for c := (blockCursor{a: a}); c.next(); {
		if memory != nil {
			*index[C.attention_block](memory, l.blocks) = c.block
		}
		l.blocks++
		l.pairs += visible(&c.block, left, right)
	}
	// A task of the forward pass has at least taskFlops, so short documents do not make many small
	// tasks.
	l.group = 1
	if l.pairs > 0 {
		const taskFlops = 4e6
		l.group = max(1, min(l.blocks, int64(taskFlops*float64(l.blocks)/(2*float64(l.pairs)*float64(dim+dv)))))
	}
	d.planTables(a, &l, backward)
	if backward {
		d.planSplits(a, &l, memory)
	}
	l.wave = kvHeads
	if l.partialFloats > 0 {
		l.wave = waveOf(kvHeads, int64(d.workers), l.splits)
	}
	l.bytes = l.partialOffset + padded(l.wave*l.partialFloats*4)
	return l
}

// planTables sets the offsets of everything before the partial sums: the tables for l.blocks
// blocks, and the scratch.
func (d *Device) planTables(a *device.Attention, l *attentionLayout, backward bool) {
	dim, dv, kvHeads := a.Q.Shape[2], a.V.Shape[2], a.K.Shape[1]
	l.splitsOffset = padded(l.blocks * C.sizeof_attention_block)
	l.kvHeadOffset = l.splitsOffset + padded(C.ATT_MAX_SPLITS*C.sizeof_attention_split)
	l.firstOffset = l.kvHeadOffset + padded(a.Q.Shape[1]*8)
	l.scratchOffset = l.firstOffset + padded((kvHeads+1)*8)
	if backward && !a.Slopes.IsNil() {
		l.slopesOffset = l.scratchOffset
		l.scratchOffset += padded(a.Q.Shape[1] * C.ATT_MAX_SPLITS * 8)
	}
	l.scratchFloats = int64(C.attention_forward_floats(C.int64_t(dim), C.int64_t(dv), isBF16(a.Q.DType)))
	if backward {
		l.largestGroup = largestGroup(a)
		var grouped, passes C.int64_t
		if l.largestGroup > 1 {
			grouped = 1
		}
		if scored(a) {
			passes = 1
		}
		l.scratchFloats =
			int64(C.attention_backward_floats(C.int64_t(dim), C.int64_t(dv), isBF16(a.Q.DType), grouped, passes))
	}
	l.partialOffset = l.scratchOffset + padded(int64(d.workers)*l.scratchFloats*4)
}

// scored reports whether scores are capped, biased or dropped.
func scored(a *device.Attention) bool {
	return a.Softcap != 0 || !a.Slopes.IsNil() || a.Dropout != 0
}

// splitsFor returns the number of splits of a key head in the backward pass.
func splitsFor(pairs float64, dim, dv int64) int64 {
	return max(1, int64(min(C.ATT_MAX_SPLITS, pairs*float64(6*dim+4*dv)/splitFlops)))
}

// waveOf returns the number of key heads whose partial sums are in memory at the same time.
func waveOf(kvHeads, workers, splits int64) int64 { return min(kvHeads, ceilDiv(4*workers, splits)) }

// planSplits divides the blocks into splits of about equal work.
func (d *Device) planSplits(a *device.Attention, l *attentionLayout, memory unsafe.Pointer) {
	left, right := a.Window.Sides(a.Causal)
	want := splitsFor(float64(l.pairs), a.Q.Shape[2], a.V.Shape[2])
	bf16 := isBF16(a.Q.DType) != 0
	if bf16 {
		l.partialFloats = a.K.Shape[0] * (a.Q.Shape[2] + a.V.Shape[2])
	}
	allocate := func(k0, k1 int64) (from, to, offset C.int64_t) { // a partial sum of keys [k0, k1)
		offset = C.int64_t(l.partialFloats)
		l.partialFloats += (k1 - k0) * (a.Q.Shape[2] + a.V.Shape[2])
		return C.int64_t(k0), C.int64_t(k1), offset
	}
	var split C.attention_split
	began := int64(0) // the split in which the present document began
	document, from := C.int64_t(-1), int64(0)
	done, i := int64(0), int64(0)
	c := blockCursor{a: a}
	for more := c.next(); more; {
		b := c.block
		if b.document != document {
			document, began = b.document, l.splits
			from = beginKey(&b, left)
		} else if C.int64_t(i) == split.b0 {
			from = beginKey(&b, left)
		}
		i++
		done += visible(&b, left, right)
		more = c.next()
		continues := more && c.block.document == document
		if !continues && began < l.splits && l.largestGroup > 1 && !bf16 {
			split.t0, split.t1, split.tail = allocate(from, max(from, endKey(&b, right)))
		}
		// The last split also has the blocks behind the last visible pair.
		if more && (l.splits+1 == want || float64(done) < float64(l.pairs)*float64(l.splits+1)/float64(want)) {
			continue
		}
		if split.b1 = C.int64_t(i); continues {
			split.k0, split.k1, split.offset = allocate(from, max(from, endKey(&b, right)))
		}
		if memory != nil {
			*index[C.attention_split](unsafe.Add(memory, l.splitsOffset), l.splits) = split
		}
		l.splits++
		split = C.attention_split{b0: split.b1}
	}
}

// largestGroup returns the largest number of query heads of one key head.
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

// kvHead returns the key head of a query head.
func kvHead(a *device.Attention, h int64) int64 {
	return keyHeadOf(a.KVHead, h, a.Q.Shape[1], a.K.Shape[1])
}

// keyHeadOf returns the key head of query or value head h: by the table if it is not nil, otherwise
// in groups of equal size.
func keyHeadOf(table []int64, h, heads, keyHeads int64) int64 {
	if table != nil {
		return table[h]
	}
	return h / (heads / keyHeads)
}

// writeHeadTables writes the two tables with which kernels pair heads and key heads: the key head
// of each head to keyHead [heads], and the first head of each key head to first [keyHeads+1].
func writeHeadTables(keyHead, first unsafe.Pointer, table []int64, heads, keyHeads int64) {
	next := int64(0)
	for h := range heads {
		g := keyHeadOf(table, h, heads, keyHeads)
		*index[int64](keyHead, h) = g
		for ; next <= g; next++ {
			*index[int64](first, next) = h
		}
	}
	for ; next <= keyHeads; next++ {
		*index[int64](first, next) = heads
	}
}

// padded rounds a number of bytes up to a multiple of align.
func padded(n int64) int64 { return (n + align - 1) / align * align }

// index returns the address of element i of an array at p.
func index[T any](p unsafe.Pointer, i int64) *T {
	var t T
	return (*T)(unsafe.Add(p, i*int64(unsafe.Sizeof(t))))
}
