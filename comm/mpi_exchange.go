package comm

/*
#include "mpi_bridge.h"
*/
import "C"

import (
	"math"
	"os"
	"runtime"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Limits of one message and of one library call, in bytes. Counts of MPI 3 are ints; tests make the
// limits small.
var (
	mpiMessage int64 = 1 << 30 // longer messages are split
	// collectives whose last byte lies beyond are made of messages instead
	mpiCall int64 = math.MaxInt32
)

// fits reports whether all blocks end within reach of one library call.
func fits(offsets, bytes []int64) bool {
	for j := range offsets {
		if offsets[j]+bytes[j] > mpiCall {
			return false
		}
	}
	return true
}

// allToAll moves the blocks of a layout and waits. It is messages between pairs, all posted at
// once, and not MPI_Alltoallv: a rank's counts alone do not tell whether they fit the ints of that
// call on every other rank, so ranks could choose different ways; and on one node it is as fast as
// MPI_Alltoall and MPI_Alltoallv at every size from 4 KiB to 64 MiB (measured, within the noise).
func (m *mpiComm) allToAll(operation string, recv, send unsafe.Pointer, l layout) error {
	if err := m.start(operation, m.pending, send, recv, l); err != nil {
		return err
	}
	err := mpiError(operation, C.umpi_wait(m.pending))
	runtime.KeepAlive(send)
	runtime.KeepAlive(recv)
	return err
}

func (m *mpiComm) start(operation string, p *C.umpi_pending, send, recv unsafe.Pointer, l layout) error {
	m.seq++
	at := func(v []int64) *C.int64_t { return (*C.int64_t)(unsafe.Pointer(&v[0])) }
	return mpiError(operation, C.umpi_exchange_start(m.c, C.int(m.rank), C.int(m.size), (*C.char)(send), at(l.soffsets), at(l.sbytes),
		(*C.char)(recv), at(l.roffsets), at(l.rbytes), C.int64_t(m.seq), C.int64_t(mpiMessage), p))
}

func (m *mpiComm) prepareAllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (layout, error) {
	if err := m.open("comm.AllToAll"); err != nil {
		return layout{}, err
	}
	if err := checkAllToAll(dst, src, recvRows, sendRows, m.size); err != nil {
		return layout{}, err
	}
	if err := ready(s); err != nil {
		return layout{}, err
	}
	if send, recv := sendRows[m.rank]*rowBytes(src), recvRows[m.rank]*rowBytes(dst); send != recv {
		return layout{}, status.Errorf(status.InvalidArgument, "comm.AllToAll: rank %d sends itself %d bytes and expects %d", m.rank, send, recv)
	}
	l := m.layout()
	layRows(l.soffsets, l.sbytes, sendRows, rowBytes(src))
	layRows(l.roffsets, l.rbytes, recvRows, rowBytes(dst))
	return l, nil
}

func (m *mpiComm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	l, err := m.prepareAllToAll(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	return m.allToAll("comm.AllToAll", dst.Data, src.Data, l)
}

func (m *mpiComm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	l, err := m.prepareAllToAll(s, dst, src, recvRows, sendRows)
	if err != nil {
		return nil, err
	}
	return m.startRequest(dst, src, l)
}

// TakesDeviceMemory reports a library that says so, or a user who knows better: ULYSSES_MPI_CUDA=1,
// 0.
func (m *mpiComm) TakesDeviceMemory() bool {
	if known := os.Getenv("ULYSSES_MPI_CUDA"); known != "" {
		return known == "1"
	}
	var yes C.int
	return C.umpi_device_memory(&yes) == 0 && yes != 0
}

// AllToAllDirect leaves out the rank's own rows: a copy by the processor would not reach them.
func (m *mpiComm) AllToAllDirect(dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	dst, src = anywhere(dst), anywhere(src)
	l, err := m.prepareAllToAll(nil, dst, src, recvRows, sendRows)
	if err != nil {
		return nil, err
	}
	l.sbytes[m.rank], l.rbytes[m.rank] = 0, 0
	return m.startRequest(dst, src, l)
}

func (m *mpiComm) startRequest(dst, src tensor.Tensor, l layout) (Request, error) {
	var r *mpiRequest
	if n := len(m.spare); n > 0 {
		r, m.spare = m.spare[n-1], m.spare[:n-1]
	} else {
		r = &mpiRequest{m: m}
		if err := mpiError("comm.AllToAll", C.umpi_pending_new(&r.pending)); err != nil {
			return nil, err
		}
	}
	for _, p := range [2]unsafe.Pointer{dst.Data, src.Data} {
		if p != nil {
			r.pins.Pin(p)
		}
	}
	if err := m.start("comm.AllToAll", r.pending, src.Data, dst.Data, l); err != nil {
		return nil, err // the job is over: what was posted stays pinned
	}
	r.active = true
	return r, nil
}

// Wait finishes the exchange. It is called once.
func (r *mpiRequest) Wait() error {
	if !r.active {
		return status.Errorf(status.InvalidArgument, "comm.AllToAll: the request has been waited for already")
	}
	err := mpiError("comm.AllToAll", C.umpi_wait(r.pending))
	r.active = false
	r.pins.Unpin()
	r.m.spare = append(r.m.spare, r)
	return err
}

// Test lets the exchange proceed and reports whether Wait would return at once.
func (r *mpiRequest) Test() (bool, error) {
	if !r.active {
		return true, nil
	}
	r.done = 0
	err := mpiError("comm.AllToAll", C.umpi_test(r.pending, &r.done))
	return r.done != 0, err
}

func (m *mpiComm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	const name = "comm.SendRecv"
	if err := m.open(name); err != nil {
		return err
	}
	if err := checkSendRecv(recv, from, send, to, m.size); err != nil {
		return err
	}
	if err := ready(s); err != nil {
		return err
	}
	return mpiError(name, C.umpi_sendrecv(m.c, (*C.char)(recv.Data), C.int64_t(recv.Bytes()), C.int(from),
		(*C.char)(send.Data), C.int64_t(send.Bytes()), C.int(to), C.int64_t(mpiMessage), m.pending))
}

// AllToAllLibrary is MPI_Alltoall itself, for blocks of equal bytes: what benchmarks compare
// AllToAll with (by type assertion).
func (m *mpiComm) AllToAllLibrary(dst, src tensor.Tensor) error {
	return mpiError("MPI_Alltoall", C.umpi_alltoall(m.c, src.Data, dst.Data, C.int(src.Bytes()/int64(m.size))))
}
