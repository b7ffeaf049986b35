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

// hostComm is a communicator made of two collectives of a host program, for launchers whose MPI is
// not known here. Both are collective over all its ranks and block, and so does every call:
// SendRecv is called by all ranks, those with nothing to move with negative peers, and what
// AllToAllStart starts is done when it returns. Counts that ranks do not agree on are for the
// host's library to notice. It serves one goroutine at a time together with its duplicates, for the
// host's calls must come in one order on all ranks.
type hostComm struct {
	collectives
	allgather Allgather
	alltoallv Alltoallv
	end       *hostEnd
	closed    bool

	sent, got  []int64 // by rank: bytes of an exchange
	out, in    []byte  // scratch
	spare      []*hostRequest
	flag, wave []byte // of the barrier
}

// hostEnd is what a communicator and its duplicates share: why it can no longer be used.
type hostEnd struct{ why atomic.Pointer[status.Error] }

// Allgather brings every rank's in, of one length, to all ranks: out has them in rank order. They
// do not overlap.
type Allgather func(in, out []byte) error

// Alltoallv sends inBytes[j] bytes of in, in rank order, to rank j and receives outBytes[j] bytes
// from it into out, in rank order; a rank's block for itself is among them. They do not overlap.
type Alltoallv func(in []byte, inBytes []int64, out []byte, outBytes []int64) error

// NewHost makes a communicator of a host program's own collectives. Without alltoallv (nil) it
// agrees, gathers, broadcasts and reduces, which is what communicators for memory of a device need;
// AllToAll, ReduceScatter and SendRecv are refused.
func NewHost(rank, size int, allgather Allgather, alltoallv Alltoallv) (Comm, error) {
	switch {
	case size < 1 || rank < 0 || rank >= size:
		return nil, status.Errorf(status.InvalidArgument, "comm.NewHost: rank %d of %d ranks: ranks are 0 to size-1", rank, size)
	case allgather == nil:
		return nil, status.Errorf(status.InvalidArgument, "comm.NewHost: no allgather: give the host program's own, which agreement needs")
	}
	return newHost(rank, size, allgather, alltoallv, &hostEnd{}), nil
}

func newHost(rank, size int, allgather Allgather, alltoallv Alltoallv, end *hostEnd) *hostComm {
	h := &hostComm{allgather: allgather, alltoallv: alltoallv, end: end, sent: make([]int64, size), got: make([]int64, size),
		flag: make([]byte, 1), wave: make([]byte, size)}
	h.collectives = newCollectives(h, rank, size)
	return h
}

func (h *hostComm) Rank() int    { return h.rank }
func (h *hostComm) Size() int    { return h.size }
func (h *hostComm) Kind() string { return "host" }

// Close gives the communicator up; it is not collective.
func (h *hostComm) Close() error {
	h.closed = true
	h.in, h.out = nil, nil
	return nil
}

// Abort makes this rank's calls fail from now on. The peers' calls fail when the host's library
// gives this rank up: there is no other way to them.
func (h *hostComm) Abort(code status.Code, reason string) {
	e := &status.Error{Code: status.Comm, Text: fmt.Sprintf("rank %d ended the job (%v): %s", h.rank, code, reason)}
	h.end.why.CompareAndSwap(nil, e)
}

func (h *hostComm) open(operation string) error {
	if why := h.end.why.Load(); why != nil {
		return status.Errorf(status.Comm, "%s: this communicator has ended: %w", operation, why)
	}
	if h.closed {
		return status.Errorf(status.InvalidArgument, "%s: the communicator is closed", operation)
	}
	return nil
}

// failed hands on a failure of the host's call. Ranks may have left it at different places, so
// nothing can follow.
func (h *hostComm) failed(operation, what string, err error) error {
	if err == nil {
		return nil
	}
	e := &status.Error{Code: status.Comm, Text: operation + ": the host program's " + what + " failed: " + err.Error(), Err: err}
	h.end.why.CompareAndSwap(nil, e)
	return e
}

// gather is the host's allgather. in is not in out.
func (h *hostComm) gather(operation string, in, out []byte) error {
	if h.size == 1 {
		copy(out, in)
		return nil
	}
	return h.failed(operation, "allgather", h.allgather(in, out))
}

// exchange is the host's alltoallv of sent and got bytes.
func (h *hostComm) exchange(operation string, in, out []byte) error {
	if to, from := h.sent[h.rank], h.got[h.rank]; to != from {
		return status.Errorf(status.InvalidArgument, "%s: rank %d sends itself %d bytes and expects %d", operation, h.rank, to, from)
	}
	if h.size == 1 {
		copy(out, in)
		return nil
	}
	if h.alltoallv == nil {
		return status.Errorf(status.Unsupported, "%s: the host program gave no alltoallv: give one to exchange memory of the host", operation)
	}
	return h.failed(operation, "alltoallv", h.alltoallv(in, h.sent, out, h.got))
}

// Split serves colors that are the same on all ranks, or different on all: any other part of the
// ranks could not call the host's collectives without the rest.
func (h *hostComm) Split(color, key int) (Comm, error) {
	const name = "comm.Split"
	if err := h.open(name); err != nil {
		return nil, err
	}
	mine, all := []int64{int64(max(color, -1)), int64(key)}, make([]int64, 2*h.size)
	if err := h.gather(name, int64s(mine).RawBytes(), int64s(all).RawBytes()); err != nil {
		return nil, err
	}
	var members []int // with this rank's color, in their new order
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
			return nil, status.Errorf(status.Unsupported, "%s: color %d has %d of the host program's %d ranks: its collectives need all of them: give a communicator of those "+
				"ranks alone, or one of MPI (comm.FromMPI)", name, c, n, h.size)
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
		return nil, status.Errorf(status.Unsupported, "%s: keys would order the host program's ranks as %v: keep their order, or order the host's own ranks so", name, members)
	}
	return newHost(h.rank, h.size, h.allgather, h.alltoallv, h.end), nil
}

func (h *hostComm) Barrier() error {
	const name = "comm.Barrier"
	if err := h.open(name); err != nil {
		return err
	}
	return h.gather(name, h.flag, h.wave)
}

func (h *hostComm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	const name = "comm.AllToAll"
	if err := cmp.Or(h.open(name), checkAllToAll(dst, src, recvRows, sendRows, h.size), ready(s)); err != nil {
		return err
	}
	for j := range h.size {
		h.sent[j], h.got[j] = sendRows[j]*rowBytes(src), recvRows[j]*rowBytes(dst)
	}
	return h.exchange(name, memory(src.Data, total(h.sent)), memory(dst.Data, total(h.got)))
}

// hostRequest is an exchange that is done.
type hostRequest struct {
	h      *hostComm
	active bool
}

func (h *hostComm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	if err := h.AllToAll(s, dst, src, recvRows, sendRows); err != nil {
		return nil, err
	}
	var r *hostRequest
	if n := len(h.spare); n > 0 {
		r, h.spare = h.spare[n-1], h.spare[:n-1]
	} else {
		r = &hostRequest{h: h}
	}
	r.active = true
	return r, nil
}

// Wait finishes the exchange. It is called once.
func (r *hostRequest) Wait() error {
	if !r.active {
		return status.Errorf(status.InvalidArgument, "comm.AllToAll: the request has been waited for already")
	}
	r.active = false
	r.h.spare = append(r.h.spare, r)
	return nil
}

// Test reports whether Wait would return at once.
func (r *hostRequest) Test() (bool, error) { return true, nil }

func (h *hostComm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	const name = "comm.SendRecv"
	if err := cmp.Or(h.open(name), checkSendRecv(recv, from, send, to, h.size), ready(s)); err != nil {
		return err
	}
	clear(h.sent)
	clear(h.got)
	if to >= 0 {
		h.sent[to] = send.Bytes()
	}
	if from >= 0 {
		h.got[from] = recv.Bytes()
	}
	return h.exchange(name, memory(send.Data, total(h.sent)), memory(recv.Data, total(h.got)))
}
