package main

/*
#include "thread.h"
#include "ulysses.h"

// HOST evaluates a call of the host's code with the host's signal mask.
#define HOST(call) \
	({ \
		sigset_t mask; \
		uly_enter_host(&mask); \
		__auto_type result = (call); \
		uly_leave_host(&mask); \
		result; \
	})

static int32_t call_allgather(const ulysses_host_comm *h, const void *in, void *out,
                              int64_t bytes) {
	return HOST(h->allgather(h->user, in, out, bytes));
}
static int32_t call_alltoallv(const ulysses_host_comm *h, const void *in, const int64_t *in_bytes,
                              void *out, const int64_t *out_bytes) {
	return HOST(h->alltoallv(h->user, in, in_bytes, out, out_bytes));
}
static void call_log(void *f, uintptr_t user, int32_t level, const char *line) {
	HOST((((void (*)(void *, int32_t, const char *))f)((void *)user, level, line), 0));
}
static void *enter_host(void) { return uly_enter_host; }
static void *leave_host(void) { return uly_leave_host; }
*/
import "C"

import (
	"os"
	"strconv"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/slurm"
)

// MPI may wait for other ranks for any time. The host's signals are delivered during MPI calls.
func init() { comm.SetMPIHooks(C.enter_host(), C.leave_host()) }

// shareOfCores returns how many CPU threads this rank should have, by the cores of the calling
// thread. (Go reads them when the library is loaded, which may be before the host has set them.)
// Collective.
func shareOfCores(op string, c comm.Comm) (int, error) {
	host, _ := os.Hostname()
	all, err := comm.GatherJSON(c, op, proc.Place{Host: host, Cores: proc.ThreadCores()})
	if err != nil {
		return 0, err
	}
	env := slurm.Env()
	return proc.Threads(all, c.Rank(), env.LocalSize, proc.CPULimit(env.CPUs)), nil
}

// callLog passes a line to the host's log function. The line is valid during the call.
func callLog(f unsafe.Pointer, user uintptr, level int32, line string) {
	text := append([]byte(line), 0)
	C.call_log(f, C.uintptr_t(user), C.int32_t(level), (*C.char)(unsafe.Pointer(&text[0])))
}

// newMPI creates a context on a duplicate of the host's communicator. Collective.
func newMPI(fcomm int64, opts, out unsafe.Pointer) error {
	const op = "ulysses_context_create_mpi"
	c, err := comm.FromMPI(fcomm)
	if err != nil {
		return err
	}
	return newOnComm(op, c, true, opts, out)
}

// newOnComm reads the options and creates a context on a communicator. If one rank's arguments are
// invalid, all ranks return an error. hasAlltoallv is true if the communicator can send tensors in
// host memory. Collective.
func newOnComm(op string, c comm.Comm, hasAlltoallv bool, opts, out unsafe.Pointer) error {
	var s settings
	// guarded here, so that ranks also agree on unreadable memory
	err := guarded(func() (err error) {
		if err = clearOut(op, out); err == nil {
			s, err = readOptions(op, opts)
		}
		return err
	})
	s.hasAlltoallv = hasAlltoallv
	if err := comm.Agree(c, err); err != nil {
		c.Close()
		return err
	}
	return newContext(op, s, c, out)
}

// newHost creates a context on the host's own collectives. Collective.
func newHost(desc, opts, out unsafe.Pointer) error {
	const op = "ulysses_context_create_host"
	h, err := readStruct[cHostComm](op, "host", desc)
	if err != nil {
		return err
	}
	if h.allgather == nil || h.size < 1 {
		return invalid("%s: host.allgather is %p and host.size %d; give a function and at least 1 rank", op,
			h.allgather, h.size)
	}
	failed := func(name string, code C.int32_t) error {
		if code == 0 {
			return nil
		}
		return status.Errorf(status.Comm, "%s: the host's %s returned %d; see its own messages", op, name, int32(code))
	}
	copied := new(cHostComm)
	*copied = h
	host := (*C.ulysses_host_comm)(unsafe.Pointer(copied))
	gather := func(in, out []byte) error {
		return failed("allgather",
			C.call_allgather(host, unsafe.Pointer(unsafe.SliceData(in)), unsafe.Pointer(unsafe.SliceData(out)),
				C.int64_t(len(in))))
	}
	var allToAll func(in []byte, inBytes []int64, out []byte, outBytes []int64) error
	if h.alltoallv != nil {
		allToAll = func(in []byte, inBytes []int64, out []byte, outBytes []int64) error {
			return failed("alltoallv",
				C.call_alltoallv(host, unsafe.Pointer(unsafe.SliceData(in)),
					(*C.int64_t)(unsafe.Pointer(unsafe.SliceData(inBytes))), unsafe.Pointer(unsafe.SliceData(out)),
					(*C.int64_t)(unsafe.Pointer(unsafe.SliceData(outBytes)))))
		}
	}
	// A rank with an invalid number also takes part in the agreement: the host's allgather orders
	// the blocks.
	c, err := comm.NewHost(int(max(0, min(h.rank, h.size-1))), int(h.size), gather, allToAll)
	if err != nil {
		return err
	}
	if h.reserved != 0 {
		err = invalid("%s: host.reserved is %d; leave it 0", op, h.reserved)
	} else if h.rank < 0 || h.rank >= h.size {
		err = invalid("%s: host.rank is %d and host.size %d; give a rank from 0 to size-1", op, h.rank, h.size)
	}
	if err = comm.Agree(c, err); err != nil {
		return err
	}
	if err := checkRankOrder(op, c); err != nil {
		return err
	}
	return newOnComm(op, c, allToAll != nil, opts, out)
}

// checkRankOrder refuses ranks that two processes have, and an allgather whose blocks are not in
// rank order: data would arrive at the wrong ranks. All ranks return the same result. Collective.
func checkRankOrder(op string, c comm.Comm) error {
	all, err := comm.GatherBytes(c, []byte(strconv.Itoa(c.Rank())))
	if err != nil {
		return err
	}
	for position, rank := range all {
		if string(rank) != strconv.Itoa(position) {
			return invalid(
				"%s: allgather has rank %s's block at position %d of %d; every rank from 0 to size-1 must be there once, and blocks must be in rank order",
				op, rank, position, len(all))
		}
	}
	return nil
}
