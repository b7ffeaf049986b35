package comm

import (
	"cmp"
	"slices"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// hostCall is the limit in bytes of one rank's block up to which an all-gather is one call of the
// host's allgather. Tests lower it.
var hostCall int64 = 1 << 30

// The methods of transport.

func (h *hostComm) hasAllToAll() bool { return h.alltoallv != nil }

// allToAll packs the blocks of src, because the host's alltoallv wants them one after another.
func (h *hostComm) allToAll(operation string, dst, src unsafe.Pointer, l layout) error {
	in, at := room(&h.in, total(l.sbytes)), int64(0)
	for j, n := range l.sbytes {
		at += int64(copy(in[at:], memory(place(src, l.soffsets[j], n), n)))
	}
	copy(h.sent, l.sbytes)
	copy(h.got, l.rbytes)
	return h.exchange(operation, in, memory(dst, total(l.rbytes)))
}

func (h *hostComm) allGather(operation string, all, own unsafe.Pointer, n int64) error {
	return h.gather(operation, memory(own, n), memory(all, n*int64(h.size)))
}

// allGatherV is one call of the host's allgather if all blocks have one length, and rounds
// otherwise. The choice depends on bytes alone, which all ranks know.
func (h *hostComm) allGatherV(operation string, all, own unsafe.Pointer, bytes []int64) error {
	longest, mine, first := slices.Max(bytes), bytes[h.rank], before(bytes, h.rank)
	if longest == slices.Min(bytes) && longest <= hostCall {
		if longest == 0 {
			return nil
		}
		in := memory(own, mine)
		if own == unsafe.Add(all, first) {
			in = room(&h.in, mine)
			copy(in, memory(own, mine))
		}
		return h.gather(operation, in, memory(all, mine*int64(h.size)))
	}
	round := h.roundBytes()
	// Blocks of unequal length are padded to the longest.
	for lo := int64(0); lo < longest; lo += round {
		n := min(round, longest-lo)
		in, out := room(&h.in, n), room(&h.out, n*int64(h.size))
		clear(in)
		if k := min(n, mine-lo); k > 0 {
			copy(in, memory(unsafe.Add(own, lo), k))
		}
		if err := h.gather(operation, in, out); err != nil {
			return err
		}
		at := lo
		for j, n2 := range bytes {
			if k := min(n, n2-lo); k > 0 && j != h.rank {
				copy(memory(unsafe.Add(all, at), k), out[int64(j)*n:])
			}
			at += n2
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
	round, bytes := h.roundBytes(), t.Bytes()
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
