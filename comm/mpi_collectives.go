package comm

/*
#include "mpi_bridge.h"
*/
import "C"

import (
	"cmp"
	"slices"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func (m *mpiComm) Barrier() error {
	if err := m.open("comm.Barrier"); err != nil {
		return err
	}
	return mpiError("comm.Barrier", m.waits(func() C.int { return C.umpi_barrier(m.c) }))
}

func (m *mpiComm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	const name = "comm.Broadcast"
	if err := cmp.Or(m.open(name), checkMemory(name, "tensor", t), checkRoot(root, m.size), waitFor(s)); err != nil {
		return err
	}
	broadcast := func(p unsafe.Pointer, n int64) C.int {
		return C.umpi_broadcast(m.c, p, C.int(n), C.int(root))
	}
	all := t.Bytes()
	if all > 0 && all <= C.UMPI_SMALL {
		return mpiError(name, m.waits(func() C.int { return broadcast(t.Data, all) }))
	}
	if all > 0 {
		if err := mpiError(name, m.waits(func() C.int { return broadcast(pointer(m.flags), 1) })); err != nil {
			return err
		}
	}
	for at := int64(0); at < all; at += mpiMaxMessage {
		n := min(mpiMaxMessage, all-at)
		if err := mpiError(name, broadcast(blockAt(t.Data, at, n), n)); err != nil {
			return err
		}
	}
	return nil
}

// broadcastBytes broadcasts data with empi. done is false if the program was built without empi or
// if data does not fit one message.
func (m *mpiComm) broadcastBytes(data []byte, root int) (done bool, err error) {
	if m.control == nil || int64(len(data)) > mpiMaxMessage || len(data) == 0 {
		return false, nil
	}
	if err = m.control(root, data); err != nil {
		return false, status.Errorf(status.Comm, "comm.BroadcastBytes: %w", err)
	}
	return true, nil
}

// The methods of transport.

func (m *mpiComm) hasAllToAll() bool { return true }

func (m *mpiComm) allGather(operation string, all, own unsafe.Pointer, n int64) error {
	gather := func() C.int { return C.umpi_allgather(m.c, own, C.int(n), all) }
	if n <= C.UMPI_SMALL {
		return mpiError(operation, m.waits(gather))
	}
	if err := m.waitForAll(operation); err != nil {
		return err
	}
	return mpiError(operation, gather())
}

// waitForAll gathers one byte from every rank, which takes until the last rank has arrived.
func (m *mpiComm) waitForAll(operation string) error {
	own := pointer(m.flags[m.size:])
	return mpiError(operation, m.waits(func() C.int { return C.umpi_allgather(m.c, own, 1, pointer(m.flags)) }))
}

// allGatherV calls MPI_Allgatherv or, if offsets do not fit the ints of that function, sends
// messages between pairs. All ranks have all counts, so they make the same choice.
func (m *mpiComm) allGatherV(operation string, all, own unsafe.Pointer, bytes []int64) error {
	l, at := m.layout(), before(bytes, m.rank)
	contiguous(l.roffsets, l.rbytes, bytes, 1)
	copyBytes(blockAt(all, at, bytes[m.rank]), own, bytes[m.rank])
	if !fitsOneCall(l.roffsets, l.rbytes) {
		for j := range l.sbytes {
			l.soffsets[j], l.sbytes[j] = at, bytes[m.rank]
		}
		return m.allToAll(operation, all, all, l)
	}
	small := slices.Max(bytes) <= C.UMPI_SMALL
	if !small {
		if err := m.waitForAll(operation); err != nil {
			return err
		}
	}
	n := m.size
	for j := range n {
		m.ints[j], m.ints[n+j] = C.int(l.rbytes[j]), C.int(l.roffsets[j])
	}
	gather := func() C.int { return C.umpi_allgatherv(m.c, all, &m.ints[0], &m.ints[n]) }
	if small {
		return mpiError(operation, m.waits(gather))
	}
	return mpiError(operation, gather())
}
