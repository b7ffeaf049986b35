package comm

import (
	"cmp"
	"slices"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// hostCall is the bytes of one rank's block up to which an all-gather is one call of the host's;
// tests make it small.
var hostCall int64 = 1 << 30

// hostRound is the bytes of each rank that move at a time through scratch; it is the same on all
// ranks.
func (h *hostComm) hostRound() int64 { return max(reduceScratch/int64(h.size)/64*64, 64) }

func (h *hostComm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.AllGather"
	if err := cmp.Or(h.open(name), checkParts(name, "dst", "src", dst, src, rows, h.rank, h.size), ready(s)); err != nil {
		return err
	}
	for j := range h.size {
		h.got[j] = rows[j] * rowBytes(dst)
	}
	return h.gatherv(name, dst.Data, src.Data)
}

// gatherv brings all ranks' own, of got bytes, to all. own may be its place in all. What is called
// depends on got alone, which all ranks know.
func (h *hostComm) gatherv(name string, all, own unsafe.Pointer) error {
	longest, mine, first := slices.Max(h.got), h.got[h.rank], before(h.got, h.rank)
	if longest == slices.Min(h.got) && longest <= hostCall {
		if longest == 0 {
			return nil
		}
		in := memory(own, mine)
		if own == unsafe.Add(all, first) {
			in = room(&h.in, mine)
			copy(in, memory(own, mine))
		}
		return h.gather(name, in, memory(all, mine*int64(h.size)))
	}
	round := h.hostRound()
	// blocks of unequal length travel as long as the longest
	for lo := int64(0); lo < longest; lo += round {
		n := min(round, longest-lo)
		in, out := room(&h.in, n), room(&h.out, n*int64(h.size))
		clear(in)
		if k := min(n, mine-lo); k > 0 {
			copy(in, memory(unsafe.Add(own, lo), k))
		}
		if err := h.gather(name, in, out); err != nil {
			return err
		}
		at := lo
		for j, bytes := range h.got {
			if k := min(n, bytes-lo); k > 0 && j != h.rank {
				copy(memory(unsafe.Add(all, at), k), out[int64(j)*n:])
			}
			at += bytes
		}
	}
	copyBytes(place(all, first, mine), own, mine)
	return nil
}

func (h *hostComm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	const name = "comm.Broadcast"
	if err := cmp.Or(h.open(name), usable(name, "tensor", t), checkRoot(root, h.size), ready(s)); err != nil {
		return err
	}
	if h.size == 1 {
		return nil
	}
	round, bytes := h.hostRound(), t.Bytes()
	for lo := int64(0); lo < bytes; lo += round {
		now := memory(unsafe.Add(t.Data, lo), min(round, bytes-lo))
		if err := h.spread(name, now, root); err != nil {
			return err
		}
	}
	return nil
}

// spread brings the root's bytes to every other rank.
func (h *hostComm) spread(name string, data []byte, root int) error {
	n := int64(len(data))
	if h.alltoallv == nil { // everyone sends, and all but the root's is dropped
		out := room(&h.out, n*int64(h.size))
		if err := h.gather(name, data, out); err != nil {
			return err
		}
		copy(data, out[int64(root)*n:])
		return nil
	}
	clear(h.sent)
	clear(h.got)
	if h.rank != root {
		h.got[root] = n
		return h.exchange(name, nil, data)
	}
	in, at := room(&h.in, n*int64(h.size-1)), int64(0)
	for j := range h.sent {
		if j != root {
			h.sent[j] = n
			at += int64(copy(in[at:], data))
		}
	}
	return h.exchange(name, in, nil)
}

func (h *hostComm) AllReduce(s device.Stream, t tensor.Tensor, op Op) error {
	const name = "comm.AllReduce"
	if err := cmp.Or(h.open(name), checkReduce(name, t, op), ready(s)); err != nil {
		return err
	}
	bytes, elem := t.Bytes(), t.DType.Size()
	if h.size == 1 || bytes == 0 {
		return nil
	}
	if h.alltoallv == nil || bytes*int64(h.size) <= smallReduce { // every rank sums everything
		return h.reduceGathered(name, op, t)
	}
	part := func(j int) (at, n int64) {
		lo, hi := Shard(t.Numel(), h.size, j)
		return lo * elem, (hi - lo) * elem
	}
	at, n := part(h.rank)
	own := place(t.Data, at, n)
	if err := h.reduceParts(name, op, t.DType, own, t.Data, part); err != nil {
		return err
	}
	for j := range h.size {
		_, h.got[j] = part(j)
	}
	return h.gatherv(name, t.Data, own)
}

func (h *hostComm) reduceGathered(name string, op Op, t tensor.Tensor) error {
	round, bytes := h.hostRound(), t.Bytes()
	for lo := int64(0); lo < bytes; lo += round {
		n := min(round, bytes-lo)
		out, now := room(&h.out, n*int64(h.size)), unsafe.Add(t.Data, lo)
		if err := h.gather(name, memory(now, n), out); err != nil {
			return err
		}
		h.combine(op, t.DType, now, out, n)
	}
	return nil
}

// combine reduces blocks of n bytes, one of each rank, in rank order.
func (h *hostComm) combine(op Op, dtype tensor.DType, dst unsafe.Pointer, blocks []byte, n int64) {
	for j := range h.parts {
		h.parts[j] = unsafe.Pointer(&blocks[int64(j)*n])
	}
	reduce(op, dtype, dst, h.parts, n/dtype.Size())
}

func (h *hostComm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.ReduceScatter"
	if err := cmp.Or(h.open(name), checkParts(name, "src", "dst", src, dst, rows, h.rank, h.size), checkReduce(name, src, Sum), ready(s)); err != nil {
		return err
	}
	row := rowBytes(src)
	return h.reduceParts(name, Sum, src.DType, dst.Data, src.Data, func(j int) (at, n int64) { return before(rows, j) * row, rows[j] * row })
}

// reduceParts leaves in dst this rank's part of src, combined over the ranks, in rounds of one size
// on all ranks.
func (h *hostComm) reduceParts(name string, op Op, dtype tensor.DType, dst, src unsafe.Pointer, part func(rank int) (at, n int64)) error {
	round, longest := h.hostRound(), int64(0)
	for j := range h.size {
		_, n := part(j)
		longest = max(longest, n)
	}
	_, mine := part(h.rank)
	for lo := int64(0); lo < longest; lo += round {
		now := max(0, min(round, mine-lo))
		in, out, used := room(&h.in, min(round, longest)*int64(h.size)), room(&h.out, now*int64(h.size)), int64(0)
		for j := range h.size {
			at, n := part(j)
			h.sent[j], h.got[j] = max(0, min(round, n-lo)), now
			copy(in[used:], memory(place(src, at+lo, h.sent[j]), h.sent[j]))
			used += h.sent[j]
		}
		if err := h.exchange(name, in[:used], out); err != nil {
			return err
		}
		if now > 0 {
			h.combine(op, dtype, unsafe.Add(dst, lo), out, now)
		}
	}
	return nil
}
