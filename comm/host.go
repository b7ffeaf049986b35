package comm

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// hostComm is a communicator that calls two collectives of a host program, for launchers with an
// MPI library that this package does not know. Both collectives involve all ranks and block.
// Therefore every call here blocks: all ranks call SendRecv (with negative peers if they have no
// message), and an all-to-all is complete when AllToAllStart returns. The host's library must
// detect counts that differ between ranks. A hostComm and its duplicates together serve one
// goroutine at a time, because all ranks must make the host's calls in the same order.
type hostComm struct {
	collectives
	allgather Allgather
	alltoallv Alltoallv // nil if the host program has none
	failure   *hostFailure
	closed    bool

	sendBytes, recvBytes  []int64 // by rank: of an alltoallv
	out, in               []byte  // scratch
	spare                 freeList[hostRequest]
	barrierIn, barrierOut []byte
}

// hostFailure is shared by a communicator and its duplicates. After the first failure, all calls
// return it.
type hostFailure struct {
	first atomic.Pointer[status.Error]
}

// Allgather copies in of every rank to out on every rank, in rank order. in has the same length on
// all ranks, and len(out) = size·len(in). in and out do not overlap.
type Allgather func(in, out []byte) error

// Alltoallv sends inBytes[j] bytes of in, in rank order, to rank j and receives outBytes[j] bytes
// from it into out, in rank order. The block of a rank for itself is included. in and out do not
// overlap.
type Alltoallv func(in []byte, inBytes []int64, out []byte, outBytes []int64) error

// NewHost makes a communicator from a host program's own collectives. If alltoallv is nil,
// AllToAll, ReduceScatter and SendRecv return an error. Agreement, AllGather, Broadcast and
// AllReduce work, which is enough for communicators for device memory. NewHost is not collective.
func NewHost(rank, size int, allgather Allgather, alltoallv Alltoallv) (Comm, error) {
	switch {
	case size < 1 || rank < 0 || rank >= size:
		return nil, status.Errorf(status.InvalidArgument, "comm.NewHost: rank %d of %d ranks; a rank is 0 to size-1",
			rank, size)
	case allgather == nil:
		return nil, status.Errorf(status.InvalidArgument,
			"comm.NewHost: allgather is nil; pass the host program's allgather")
	}
	return newHost(rank, size, allgather, alltoallv, &hostFailure{}), nil
}

func newHost(rank, size int, allgather Allgather, alltoallv Alltoallv, failure *hostFailure) *hostComm {
	h := &hostComm{allgather: allgather, alltoallv: alltoallv, failure: failure, sendBytes: make([]int64, size),
		recvBytes: make([]int64, size), barrierIn: make([]byte, 1), barrierOut: make([]byte, size)}
	h.collectives = newCollectives(h, rank, size)
	return h
}

func (h *hostComm) Rank() int    { return h.rank }
func (h *hostComm) Size() int    { return h.size }
func (h *hostComm) Kind() string { return "host" }

// Close releases the communicator. It is not collective.
func (h *hostComm) Close() error {
	h.closed = true
	h.in, h.out = nil, nil
	return nil
}

// Abort makes all later calls on this rank fail. The calls of other ranks fail when the host's
// library detects that this rank does not answer; this package cannot reach them.
func (h *hostComm) Abort(code status.Code, reason string) {
	e := &status.Error{Code: status.Comm, Text: fmt.Sprintf("rank %d ended the job (%v): %s", h.rank, code, reason)}
	h.failure.first.CompareAndSwap(nil, e)
}

func (h *hostComm) open(operation string) error {
	if first := h.failure.first.Load(); first != nil {
		return status.Errorf(status.Comm, "%s: an earlier call has failed: %w", operation, first)
	}
	if h.closed {
		return errClosed(operation)
	}
	return nil
}

// failed returns the error of a host's call and makes all later calls fail: ranks may have left the
// call at different points, so their next calls would not match.
func (h *hostComm) failed(operation, collective string, err error) error {
	if err == nil {
		return nil
	}
	e := &status.Error{Code: status.Comm, Text: operation + ": the host program's " + collective + " failed: " +
		err.Error(), Err: err}
	h.failure.first.CompareAndSwap(nil, e)
	return e
}

// callAllgather calls the host's allgather. in and out do not overlap.
func (h *hostComm) callAllgather(operation string, in, out []byte) error {
	if h.size == 1 {
		copy(out, in)
		return nil
	}
	return h.failed(operation, "allgather", h.allgather(in, out))
}

// callAlltoallv calls the host's alltoallv with sendBytes and recvBytes.
func (h *hostComm) callAlltoallv(operation string, in, out []byte) error {
	if err := CheckOwnBlock(operation, h.rank, h.sendBytes[h.rank], h.recvBytes[h.rank]); err != nil {
		return err
	}
	if h.size == 1 {
		copy(out, in)
		return nil
	}
	if h.alltoallv == nil {
		return status.Errorf(status.Unsupported,
			"%s: the host program gave no alltoallv; pass one to comm.NewHost to move host memory", operation)
	}
	return h.failed(operation, "alltoallv", h.alltoallv(in, h.sendBytes, out, h.recvBytes))
}

// Split supports colors that are equal on all ranks or different on all ranks. Any other group
// could not call the host's collectives, which involve all ranks. Collective.
func (h *hostComm) Split(color, key int) (Comm, error) {
	const name = "comm.Split"
	if err := h.open(name); err != nil {
		return nil, err
	}
	mine, all := []int64{int64(max(color, -1)), int64(key)}, make([]int64, 2*h.size)
	if err := h.callAllgather(name, int64s(mine).RawBytes(), int64s(all).RawBytes()); err != nil {
		return nil, err
	}
	var members []int // the ranks with this rank's color, in their new order
	groups := map[int64]int{}
	for r := range h.size {
		if c := all[2*r]; c >= 0 {
			groups[c]++
		}
		if all[2*r] == mine[0] {
			members = append(members, r)
		}
	}
	for c, n := range groups {
		if n != 1 && n != h.size {
			return nil, status.Errorf(status.Unsupported,
				"%s: color %d has %d of %d ranks, but the host program's collectives need all ranks; "+
					"pass an MPI communicator (comm.FromMPI) instead", name, c, n, h.size)
		}
	}
	if color < 0 {
		return nil, nil
	}
	if len(members) == 1 {
		return Local(1)[0], nil
	}
	slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(all[2*a+1], all[2*b+1]) })
	if !slices.IsSorted(members) {
		return nil, status.Errorf(status.Unsupported,
			"%s: the keys order the host program's ranks as %v, which its collectives do not support; use keys that increase with the rank",
			name, members)
	}
	return newHost(h.rank, h.size, h.allgather, h.alltoallv, h.failure), nil
}

func (h *hostComm) Barrier() error {
	const name = "comm.Barrier"
	if err := h.open(name); err != nil {
		return err
	}
	return h.callAllgather(name, h.barrierIn, h.barrierOut)
}

func (h *hostComm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	const name = "comm.AllToAll"
	if err := cmp.Or(h.open(name), checkAllToAll(dst, src, recvRows, sendRows, h.size), waitFor(s)); err != nil {
		return err
	}
	for j := range h.size {
		h.sendBytes[j], h.recvBytes[j] = sendRows[j]*rowBytes(src), recvRows[j]*rowBytes(dst)
	}
	return h.callAlltoallv(name, memory(src.Data, total(h.sendBytes)), memory(dst.Data, total(h.recvBytes)))
}

// hostRequest is an all-to-all that is complete.
type hostRequest struct {
	h      *hostComm
	active bool // Wait was not called yet
}

func (h *hostComm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	if err := h.AllToAll(s, dst, src, recvRows, sendRows); err != nil {
		return nil, err
	}
	r := h.spare.get()
	r.h, r.active = h, true
	return r, nil
}

// Wait returns at once.
func (r *hostRequest) Wait() error {
	if !r.active {
		return ErrWaited()
	}
	r.active = false
	r.h.spare.put(r)
	return nil
}

// Test returns true: the all-to-all is complete.
func (r *hostRequest) Test() (bool, error) { return true, nil }

func (h *hostComm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	const name = "comm.SendRecv"
	if err := cmp.Or(h.open(name), checkSendRecv(recv, from, send, to, h.size), waitFor(s)); err != nil {
		return err
	}
	clear(h.sendBytes)
	clear(h.recvBytes)
	if to >= 0 {
		h.sendBytes[to] = send.Bytes()
	}
	if from >= 0 {
		h.recvBytes[from] = recv.Bytes()
	}
	return h.callAlltoallv(name, memory(send.Data, total(h.sendBytes)), memory(recv.Data, total(h.recvBytes)))
}
