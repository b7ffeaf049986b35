package comm

/*
#include "mpi_bridge.h"
*/
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Reductions are an exchange and sums of our own (reduce.go) instead of MPI_Allreduce: the order of
// a library's sums depends on its algorithm, on sizes and on the placing of ranks, ours is rank
// order always, so a job gives the same bits with goroutine ranks, under mpirun and under srun. The
// volume is that of a reduce-scatter and an all-gather, the least there is.

// reduceScratch is the bytes that arrive, from all ranks together, before they are summed. Tests
// make it small.
var reduceScratch int64 = 8 << 20

func (m *mpiComm) Barrier() error {
	if err := m.open("comm.Barrier"); err != nil {
		return err
	}
	return mpiError("comm.Barrier", C.umpi_barrier(m.c))
}

func (m *mpiComm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	const name = "comm.Broadcast"
	if err := m.open(name); err != nil {
		return err
	}
	if err := usable(name, "tensor", t); err != nil {
		return err
	}
	if err := checkRoot(root, m.size); err != nil {
		return err
	}
	if err := ready(s); err != nil {
		return err
	}
	for at, all := int64(0), t.Bytes(); at < all; at += mpiPiece {
		n := min(mpiPiece, all-at)
		if err := mpiError(name, C.umpi_broadcast(m.c, place(t.Data, at, n), C.int(n), C.int(root))); err != nil {
			return err
		}
	}
	return nil
}

// hostBroadcast goes over the control plane, where there is one.
func (m *mpiComm) hostBroadcast(data []byte, root int) (done bool, err error) {
	if m.control == nil || int64(len(data)) > mpiPiece || len(data) == 0 {
		return false, nil
	}
	if err = m.control(root, data); err != nil {
		return false, status.Errorf(status.Comm, "comm.BroadcastBytes: %w", err)
	}
	return true, nil
}

func (m *mpiComm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.AllGather"
	if err := m.open(name); err != nil {
		return err
	}
	if err := checkParts(name, "dst", "src", dst, src, rows, m.rank, m.size); err != nil {
		return err
	}
	if err := ready(s); err != nil {
		return err
	}
	l := m.layout()
	layRows(l.roffsets, l.rbytes, rows, rowBytes(dst))
	return m.gather(name, dst.Data, src.Data, l)
}

// gather sends own to all ranks and receives their blocks where l has them. All ranks know all
// counts, so they choose alike.
func (m *mpiComm) gather(name string, all, own unsafe.Pointer, l layout) error {
	at, mine := l.roffsets[m.rank], l.rbytes[m.rank]
	copyBytes(place(all, at, mine), own, mine)
	if !fits(l.roffsets, l.rbytes) {
		for j := range l.sbytes {
			l.soffsets[j], l.sbytes[j] = at, mine
		}
		return m.exchange(name, all, all, l)
	}
	n := m.size
	for j := range n {
		m.ints[j], m.ints[n+j] = C.int(l.rbytes[j]), C.int(l.roffsets[j])
	}
	return mpiError(name, C.umpi_allgatherv(m.c, all, &m.ints[0], &m.ints[n]))
}

func (m *mpiComm) AllReduce(s device.Stream, t tensor.Tensor, op Op) error {
	const name = "comm.AllReduce"
	if err := m.open(name); err != nil {
		return err
	}
	if err := checkReduce(name, t, op); err != nil {
		return err
	}
	if err := ready(s); err != nil {
		return err
	}
	bytes := t.Bytes()
	if m.size == 1 || bytes == 0 {
		return nil
	}
	// every rank sums everything: one collective instead of two
	if bytes*int64(m.size) <= smallReduce {
		in := m.space(bytes * int64(m.size))
		if err := mpiError(name, C.umpi_allgather(m.c, t.Data, C.int(bytes), in)); err != nil {
			return err
		}
		for j := range m.parts {
			m.parts[j] = unsafe.Add(in, int64(j)*bytes)
		}
		reduce(op, t.DType, t.Data, m.parts, t.Numel())
		return nil
	}
	elem := t.DType.Size()
	part := func(j int) (at, n int64) {
		lo, hi := Shard(t.Numel(), m.size, j)
		return lo * elem, (hi - lo) * elem
	}
	at, n := part(m.rank)
	if err := m.reduceParts(name, op, t.DType, place(t.Data, at, n), t.Data, part); err != nil {
		return err
	}
	l := m.layout()
	for j := range m.size {
		l.roffsets[j], l.rbytes[j] = part(j)
	}
	return m.gather(name, t.Data, place(t.Data, at, n), l)
}

func (m *mpiComm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.ReduceScatter"
	if err := m.open(name); err != nil {
		return err
	}
	if err := checkParts(name, "src", "dst", src, dst, rows, m.rank, m.size); err != nil {
		return err
	}
	if err := checkReduce(name, src, Sum); err != nil {
		return err
	}
	if err := ready(s); err != nil {
		return err
	}
	row := rowBytes(src)
	return m.reduceParts(name, Sum, src.DType, dst.Data, src.Data, func(j int) (at, n int64) { return before(rows, j) * row, rows[j] * row })
}

// reduceParts leaves in dst this rank's part of src, combined over the ranks. part gives a rank's
// place and bytes. It goes in rounds, so that the scratch stays small; the round's size is the same
// on all ranks.
func (m *mpiComm) reduceParts(name string, op Op, dtype tensor.DType, dst, src unsafe.Pointer, part func(rank int) (at, n int64)) error {
	round := max(reduceScratch/int64(m.size)/64*64, 64)
	var longest int64
	for j := range m.size {
		_, n := part(j)
		longest = max(longest, n)
	}
	own, mine := part(m.rank)
	in := m.space(min(round, mine) * int64(m.size))
	for lo := int64(0); lo < longest; lo += round {
		l := m.layout()
		now := max(0, min(round, mine-lo))
		for j := range m.size {
			if j == m.rank {
				continue
			}
			at, n := part(j)
			if n = min(round, n-lo); n > 0 {
				l.soffsets[j], l.sbytes[j] = at+lo, n
			}
			l.roffsets[j], l.rbytes[j] = int64(j)*now, now
		}
		if err := m.exchange(name, src, in, l); err != nil {
			return err
		}
		if now == 0 {
			continue
		}
		for j := range m.parts {
			m.parts[j] = unsafe.Add(in, int64(j)*now)
		}
		m.parts[m.rank] = unsafe.Add(src, own+lo)
		reduce(op, dtype, unsafe.Add(dst, lo), m.parts, now/dtype.Size())
	}
	return nil
}

// space is scratch of the communicator, nil for none.
func (m *mpiComm) space(bytes int64) unsafe.Pointer {
	if int64(len(m.scratch)) < bytes {
		m.scratch = make([]byte, bytes)
	}
	return place(unsafe.Pointer(unsafe.SliceData(m.scratch)), 0, bytes)
}
