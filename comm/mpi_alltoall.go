package comm

/*
#include "mpi_bridge.h"
*/
import "C"

import (
	"cmp"
	"math"
	"os"
	"runtime"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// Limits of one message and of one library call, in bytes. Counts of MPI 3 are ints. Tests lower
// the limits.
var (
	// mpiMaxMessage is the limit of one message. Longer messages are split.
	mpiMaxMessage int64 = 1 << 30
	// mpiMaxOffset is the limit of offset + bytes of a block in a collective of MPI. Beyond it,
	// messages between pairs replace the collective.
	mpiMaxOffset int64 = math.MaxInt32
)

// fitsOneCall reports whether all blocks end below mpiMaxOffset.
func fitsOneCall(offsets, bytes []int64) bool {
	for j := range offsets {
		if offsets[j]+bytes[j] > mpiMaxOffset {
			return false
		}
	}
	return true
}

// allToAll moves the blocks of a layout and waits. It posts all messages between pairs of ranks at
// once and does not use MPI_Alltoallv. A rank cannot know from its own counts whether the counts of
// all ranks fit the ints of that function, so ranks could make different choices. On one node,
// messages are as fast as MPI_Alltoall and MPI_Alltoallv at every size from 4 KiB to 64 MiB
// (measured, within the noise).
func (m *mpiComm) allToAll(operation string, recv, send unsafe.Pointer, l layout) error {
	if err := m.start(operation, m.pending, send, recv, l); err != nil {
		return err
	}
	err := m.wait(operation, m.pending)
	runtime.KeepAlive(send)
	runtime.KeepAlive(recv)
	return err
}

// wait waits for the messages of p.
func (m *mpiComm) wait(operation string, p *C.umpi_pending) error {
	err := mpiError(operation, C.umpi_wait(p, &m.seconds))
	m.addWaited(m.seconds)
	return err
}

func (m *mpiComm) start(operation string, p *C.umpi_pending, send, recv unsafe.Pointer, l layout) error {
	m.seq++
	at := func(v []int64) *C.int64_t { return (*C.int64_t)(unsafe.Pointer(&v[0])) }
	return mpiError(operation, C.umpi_alltoall_start(m.c, C.int(m.rank), C.int(m.size), (*C.char)(send), at(l.soffsets),
		at(l.sbytes), (*C.char)(recv), at(l.roffsets), at(l.rbytes), C.int64_t(m.seq), C.int64_t(mpiMaxMessage), p))
}

// prepareAllToAll checks the arguments and returns the layout of the blocks.
func (m *mpiComm) prepareAllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (layout, error) {
	const name = "comm.AllToAll"
	if err := cmp.Or(m.open(name), checkAllToAll(dst, src, recvRows, sendRows, m.size), waitFor(s)); err != nil {
		return layout{}, err
	}
	if err := CheckOwnBlock(name, m.rank, sendRows[m.rank]*rowBytes(src), recvRows[m.rank]*rowBytes(dst)); err != nil {
		return layout{}, err
	}
	l := m.layout()
	contiguous(l.soffsets, l.sbytes, sendRows, rowBytes(src))
	contiguous(l.roffsets, l.rbytes, recvRows, rowBytes(dst))
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

// TakesDeviceMemory reports whether MPI accepts pointers to GPU memory. The environment variable
// ULYSSES_MPI_CUDA (1 or 0) overrides the library's own answer.
func (m *mpiComm) TakesDeviceMemory() bool {
	if value := os.Getenv("ULYSSES_MPI_CUDA"); value != "" {
		return value == "1"
	}
	var yes C.int
	return C.umpi_device_memory(&yes) == 0 && yes != 0
}

// AllToAllDirect omits the block that a rank sends to itself, because the CPU cannot copy GPU
// memory.
func (m *mpiComm) AllToAllDirect(dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	dst, src = asHost(dst), asHost(src)
	l, err := m.prepareAllToAll(nil, dst, src, recvRows, sendRows)
	if err != nil {
		return nil, err
	}
	l.sbytes[m.rank], l.rbytes[m.rank] = 0, 0
	return m.startRequest(dst, src, l)
}

func (m *mpiComm) startRequest(dst, src tensor.Tensor, l layout) (Request, error) {
	r := m.spare.get()
	if r.m == nil {
		r.m = m
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
		// the job must end: messages may have been posted, so the memory stays pinned
		return nil, err
	}
	r.active = true
	return r, nil
}

// Wait waits until the all-to-all is complete on this rank.
func (r *mpiRequest) Wait() error {
	if !r.active {
		return ErrWaited()
	}
	err := r.m.wait("comm.AllToAll", r.pending)
	r.active = false
	r.pins.Unpin()
	r.m.spare.put(r)
	return err
}

// Test makes progress and reports whether Wait would return at once.
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
	if err := cmp.Or(m.open(name), checkSendRecv(recv, from, send, to, m.size), waitFor(s)); err != nil {
		return err
	}
	err := mpiError(name, C.umpi_sendrecv(m.c, (*C.char)(recv.Data), C.int64_t(recv.Bytes()), C.int(from),
		(*C.char)(send.Data), C.int64_t(send.Bytes()), C.int(to), C.int64_t(mpiMaxMessage), m.pending, &m.seconds))
	m.addWaited(m.seconds)
	return err
}
