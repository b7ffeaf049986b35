package main

/*
#define _GNU_SOURCE
#include <sched.h>
#include "thread.h"
#include "ulysses.h"

// HOST runs code of the host with the host's signal mask.
#define HOST(call) ({ sigset_t inside; uly_enter_host(&inside); __auto_type result = (call); uly_leave_host(&inside); result; })

static int mask_cores(void) {
	cpu_set_t mask;
	return sched_getaffinity(0, sizeof mask, &mask) ? 0 : CPU_COUNT(&mask);
}

static int32_t call_allgather(const ulysses_host_comm *h, const void *in, void *out, int64_t bytes) {
	return HOST(h->allgather(h->user, in, out, bytes));
}
static int32_t call_alltoallv(const ulysses_host_comm *h, const void *in, const int64_t *in_bytes, void *out, const int64_t *out_bytes) {
	return HOST(h->alltoallv(h->user, in, in_bytes, out, out_bytes));
}
static void call_log(void *f, void *user, int32_t level, const char *line) {
	HOST((((void (*)(void *, int32_t, const char *))f)(user, level, line), 0));
}
static void *outside(void) { return uly_enter_host; }
static void *inside(void) { return uly_leave_host; }
*/
import "C"

import (
	"runtime"
	"strconv"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
)

// MPI waits for other ranks without a time limit. The host's signals arrive meanwhile.
func init() { comm.SetMPIHooks(C.outside(), C.inside()) }

// cores are those of the calling thread's mask, now: Go looks when the library is loaded, which may
// be before the host has set it.
func cores() int {
	if n := int(C.mask_cores()); n > 0 {
		return n
	}
	return runtime.NumCPU() // more than a cpu_set_t has bits
}

// callLog hands a line to the host. It is C's for the call.
func callLog(f, user unsafe.Pointer, level int32, line string) {
	text := append([]byte(line), 0)
	C.call_log(f, user, C.int32_t(level), (*C.char)(unsafe.Pointer(&text[0])))
}

// newMPI makes a context on the host's communicator, which is duplicated.
func newMPI(fcomm int64, opts, out unsafe.Pointer) error {
	const op = "ulysses_context_create_mpi"
	c, err := comm.FromMPI(fcomm)
	if err != nil {
		return err
	}
	return newAgreed(op, c, true, opts, out)
}

// newAgreed makes a context on a communicator of several ranks: what is wrong with one's arguments
// is everyone's error. exchanges says that this rank's communicator carries tensors in memory of
// the host.
func newAgreed(op string, c comm.Comm, exchanges bool, opts, out unsafe.Pointer) error {
	s, err := options(op, opts)
	s.exchanges = exchanges
	if out == nil {
		err = invalid("%s: out is NULL", op)
	} else {
		*(*uintptr)(out) = 0
	}
	if err := comm.Agree(c, err); err != nil {
		c.Close()
		return err
	}
	return newContext(op, s, c, out)
}

// newHost makes a context on the host's own collectives.
func newHost(desc, opts, out unsafe.Pointer) error {
	const op = "ulysses_context_create_host"
	h, err := read[cHostComm](op, "host", desc)
	if err != nil {
		return err
	}
	if h.allgather == nil || h.size < 1 {
		return invalid("%s: allgather is %p and size %d: give a function and 1 rank or more", op, h.allgather, h.size)
	}
	failed := func(name string, code C.int32_t) error {
		if code == 0 {
			return nil
		}
		return status.Errorf(status.Comm, "%s: the host's %s returned %d", op, name, int32(code))
	}
	f := new(cHostComm)
	*f = h
	theirs := (*C.ulysses_host_comm)(unsafe.Pointer(f))
	gather := func(in, out []byte) error {
		return failed("allgather", C.call_allgather(theirs, unsafe.Pointer(unsafe.SliceData(in)), unsafe.Pointer(unsafe.SliceData(out)), C.int64_t(len(in))))
	}
	var exchange func(in []byte, inBytes []int64, out []byte, outBytes []int64) error
	if h.alltoallv != nil {
		exchange = func(in []byte, inBytes []int64, out []byte, outBytes []int64) error {
			return failed("alltoallv", C.call_alltoallv(theirs, unsafe.Pointer(unsafe.SliceData(in)), (*C.int64_t)(unsafe.Pointer(unsafe.SliceData(inBytes))),
				unsafe.Pointer(unsafe.SliceData(out)), (*C.int64_t)(unsafe.Pointer(unsafe.SliceData(outBytes)))))
		}
	}
	// A rank with an invalid number still takes part in the agreement: the host's allgather knows
	// its position.
	c, err := comm.NewHost(int(max(0, min(h.rank, h.size-1))), int(h.size), gather, exchange)
	if err != nil {
		return err
	}
	if h.reserved != 0 {
		err = invalid("%s: host.reserved is %d: leave it 0", op, h.reserved)
	} else if h.rank < 0 || h.rank >= h.size {
		err = invalid("%s: host.rank is %d and host.size %d: give a rank from 0 to size-1", op, h.rank, h.size)
	}
	if err = comm.Agree(c, err); err != nil {
		return err
	}
	if err := seated(op, c); err != nil {
		return err
	}
	return newAgreed(op, c, exchange != nil, opts, out)
}

// seated refuses ranks that two of the host's programs bring, and an allgather that lays blocks out
// in another order: whatever came later would go to the wrong ones. All come to one verdict.
func seated(op string, c comm.Comm) error {
	all, err := comm.GatherBytes(c, []byte(strconv.Itoa(c.Rank())))
	if err != nil {
		return err
	}
	for place, rank := range all {
		if string(rank) != strconv.Itoa(place) {
			return invalid("%s: allgather brings rank %s's block in place %d of %d: ranks are 0 to size-1, each once, and blocks lie in their order", op, rank, place, len(all))
		}
	}
	return nil
}
