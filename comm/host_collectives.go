package comm

import (
	"cmp"
	"slices"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// hostGatherLimit is the limit in bytes of one rank's block up to which an all-gather is one call
// of the host's allgather. Tests lower it.
var hostGatherLimit int64 = 1 << 30

// The methods of transport.

func (h *hostComm) hasAllToAll() bool { return h.alltoallv != nil }

// allToAll packs the blocks of src, because the host's alltoallv needs contiguous blocks.
func (h *hostComm) allToAll(operation string, dst, src unsafe.Pointer, l layout) error {
	in, at := resize(&h.in, total(l.sbytes)), int64(0)
	for j, n := range l.sbytes {
		at += int64(copy(in[at:], memory(blockAt(src, l.soffsets[j], n), n)))
	}
	copy(h.sendBytes, l.sbytes)
	copy(h.recvBytes, l.rbytes)
	return h.callAlltoallv(operation, in, memory(dst, total(l.rbytes)))
}

func (h *hostComm) allGather(operation string, all, own unsafe.Pointer, n int64) error {
	return h.callAllgather(operation, memory(own, n), memory(all, n*int64(h.size)))
}

// allGatherV calls the host's allgather once if all blocks have the same length, and in rounds
// otherwise. The choice depends only on bytes, which are equal on all ranks.
func (h *hostComm) allGatherV(operation string, all, own unsafe.Pointer, bytes []int64) error {
	longest, mine, first := slices.Max(bytes), bytes[h.rank], before(bytes, h.rank)
	if longest == slices.Min(bytes) && longest <= hostGatherLimit {
		if longest == 0 {
			return nil
		}
		in := memory(own, mine)
		if own == unsafe.Add(all, first) {
			in = resize(&h.in, mine)
			copy(in, memory(own, mine))
		}
		return h.callAllgather(operation, in, memory(all, mine*int64(h.size)))
	}
	round := h.roundBytes()
	// Blocks of unequal length are padded to the longest.
	for lo := int64(0); lo < longest; lo += round {
		n := min(round, longest-lo)
		in, out := resize(&h.in, n), resize(&h.out, n*int64(h.size))
		clear(in)
		if k := min(n, mine-lo); k > 0 {
			copy(in, memory(unsafe.Add(own, lo), k))
		}
		if err := h.callAllgather(operation, in, out); err != nil {
			return err
		}
		at := lo
		for j, length := range bytes {
			if k := min(n, length-lo); k > 0 && j != h.rank {
				copy(memory(unsafe.Add(all, at), k), out[int64(j)*n:])
			}
			at += length
		}
	}
	copyBytes(blockAt(all, first, mine), own, mine)
	return nil
}

func (h *hostComm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	const name = "comm.Broadcast"
	if err := cmp.Or(h.open(name), checkMemory(name, "tensor", t), checkRoot(root, h.size), waitFor(s)); err != nil {
		return err
	}
	if h.size == 1 {
		return nil
	}
	round, bytes := h.roundBytes(), t.Bytes()
	for lo := int64(0); lo < bytes; lo += round {
		if err := h.broadcastRound(name, memory(unsafe.Add(t.Data, lo), min(round, bytes-lo)), root); err != nil {
			return err
		}
	}
	return nil
}

// broadcastRound copies the root's data to all other ranks.
func (h *hostComm) broadcastRound(name string, data []byte, root int) error {
	n := int64(len(data))
	if h.alltoallv == nil { // all ranks send; only the root's block is used
		out := resize(&h.out, n*int64(h.size))
		if err := h.callAllgather(name, data, out); err != nil {
			return err
		}
		copy(data, out[int64(root)*n:])
		return nil
	}
	clear(h.sendBytes)
	clear(h.recvBytes)
	if h.rank != root {
		h.recvBytes[root] = n
		return h.callAlltoallv(name, nil, data)
	}
	in, at := resize(&h.in, n*int64(h.size-1)), int64(0)
	for j := range h.sendBytes {
		if j != root {
			h.sendBytes[j] = n
			at += int64(copy(in[at:], data))
		}
	}
	return h.callAlltoallv(name, in, nil)
}
