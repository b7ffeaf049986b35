package comm

/*
#include "mpi_bridge.h"
*/
import "C"

import (
	"cmp"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func (m *mpiComm) Barrier() error {
	if err := m.open("comm.Barrier"); err != nil {
		return err
	}
	return mpiError("comm.Barrier", C.umpi_barrier(m.c))
}

func (m *mpiComm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	const name = "comm.Broadcast"
	if err := cmp.Or(m.open(name), checkMemory(name, "tensor", t), checkRoot(root, m.size), waitFor(s)); err != nil {
		return err
	}
	for at, all := int64(0), t.Bytes(); at < all; at += mpiMaxMessage {
		n := min(mpiMaxMessage, all-at)
		if err := mpiError(name, C.umpi_broadcast(m.c, blockAt(t.Data, at, n), C.int(n), C.int(root))); err != nil {
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
	return mpiError(operation, C.umpi_allgather(m.c, own, C.int(n), all))
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
	n := m.size
	for j := range n {
		m.ints[j], m.ints[n+j] = C.int(l.rbytes[j]), C.int(l.roffsets[j])
	}
	return mpiError(operation, C.umpi_allgatherv(m.c, all, &m.ints[0], &m.ints[n]))
}
