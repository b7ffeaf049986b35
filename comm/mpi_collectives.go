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
	if err := cmp.Or(m.open(name), usable(name, "tensor", t), checkRoot(root, m.size), ready(s)); err != nil {
		return err
	}
	for at, all := int64(0), t.Bytes(); at < all; at += mpiMessage {
		n := min(mpiMessage, all-at)
		if err := mpiError(name, C.umpi_broadcast(m.c, place(t.Data, at, n), C.int(n), C.int(root))); err != nil {
			return err
		}
	}
	return nil
}

// hostBroadcast broadcasts bytes over the control plane. done is false if there is none, or if the
// bytes do not fit one message.
func (m *mpiComm) hostBroadcast(data []byte, root int) (done bool, err error) {
	if m.control == nil || int64(len(data)) > mpiMessage || len(data) == 0 {
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

// allGatherV is MPI_Allgatherv, or messages between pairs where offsets do not fit the ints of that
// call. All ranks know all counts, so they choose the same.
func (m *mpiComm) allGatherV(operation string, all, own unsafe.Pointer, bytes []int64) error {
	l, at := m.layout(), before(bytes, m.rank)
	layRows(l.roffsets, l.rbytes, bytes, 1)
	copyBytes(place(all, at, bytes[m.rank]), own, bytes[m.rank])
	if !fits(l.roffsets, l.rbytes) {
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
