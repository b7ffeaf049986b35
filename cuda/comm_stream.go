package cuda

// #include "bridge.h"
import "C"

import (
	"sync"
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// commStream is the communication stream, on which communicators copy and combine tensors. Events
// order it and the streams of callers. An operation runs after the work that the caller's stream
// holds (enter), and the work that is enqueued there later runs after the operation (leave). With a
// nil stream, the tensors must be ready, and the call blocks until the operation is complete.
//
// A device has two communication streams: one with priority for the sequence axis
// (comm.SplitPriority), and one that all other communicators share. An all-to-all before attention
// therefore does not wait for the weights that ZeRO stage 3 gathers for the next layer.
//
// Kernels of NCCL wait on the GPU for the other ranks. If kernels of two communicators start in
// different orders on two GPUs that have room for the blocks of only one, each GPU runs the kernel
// that the other one has not started, and both wait forever. This cannot happen if all ranks make
// their calls in one order, which package comm demands, and if no kernel starts before all blocks
// of the previous kernels of the same GPU have started. Then the first kernel that is not complete
// has started on all ranks, or will when computations have ended that wait for no rank; so it
// completes. NCCL 2.26 and newer start kernels in this order if they are told to (nccl_ordered in
// kernels.h). With other NCCL libraries, all communicators of a device share one stream. The
// transports ipc and staged have no kernels that wait: their streams wait for events of earlier
// calls alone.
type commStream struct {
	d       *Device
	s       *stream
	shared  *sharedStream
	entered *event // on the caller's stream, when the operation began
	ended   *event // the end of an operation without a request
	// requests has all requests, also if Wait failed or was never called; spare, those not in use
	requests, spare []*request
}

func newCommStream(d *Device, use streamUse) (*commStream, error) {
	l := &commStream{d: d}
	var err error
	if l.shared, err = acquireStream(d, use); err != nil {
		return nil, err
	}
	l.s = l.shared.s
	if l.entered, err = d.newEvent(false); err == nil {
		l.ended, err = d.newEvent(false)
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// close waits for the work of the communication stream and releases the stream.
func (l *commStream) close() error {
	var err error
	if l.d.open && l.s.s != nil {
		err = l.s.Sync()
	}
	for _, e := range []*event{l.entered, l.ended} {
		if e != nil {
			e.Close()
		}
	}
	for _, r := range l.requests {
		r.done.Close()
	}
	l.requests, l.spare = nil, nil
	releaseStream(l.shared)
	return err
}

// streams has the communication streams of the devices with communicators.
var streams = struct {
	sync.Mutex
	by map[streamKey]*sharedStream
}{by: map[streamKey]*sharedStream{}}

type streamKey struct {
	d   *Device
	use streamUse
}

// sharedStream is a communication stream of a device, and scratch memory of its reductions. One
// scratch is enough, because the stream orders all reductions.
type sharedStream struct {
	streamKey
	s       *stream
	scratch device.Buffer // nil if no communicator needs it
	users   int
}

// allocateScratch allocates the scratch, unless an earlier communicator has.
func (l *commStream) allocateScratch(bytes int64) (err error) {
	if l.shared.scratch == nil {
		l.shared.scratch, err = l.d.Alloc(bytes)
	}
	return err
}

func acquireStream(d *Device, use streamUse) (*sharedStream, error) {
	streams.Lock()
	defer streams.Unlock()
	key := streamKey{d, use}
	x := streams.by[key]
	if x == nil {
		s, err := d.newStream(use)
		if err != nil {
			return nil, err
		}
		x = &sharedStream{streamKey: key, s: s}
		streams.by[key] = x
	}
	x.users++
	return x, nil
}

func releaseStream(x *sharedStream) {
	streams.Lock()
	defer streams.Unlock()
	if x.users--; x.users == 0 {
		delete(streams.by, x.streamKey)
		if x.scratch != nil {
			x.scratch.Free()
		}
		x.s.Close()
	}
}

// enter orders the communication stream behind the work of s. caller is nil if s is nil.
func (l *commStream) enter(op string, s device.Stream) (caller *stream, err error) {
	from := l.s
	if s != nil {
		if caller, err = l.d.of(op, s); err != nil {
			return nil, err
		}
		from = caller
	}
	if err := from.Record(l.entered); err != nil || caller == nil {
		return nil, err
	}
	return caller, l.s.Wait(l.entered)
}

// leave orders later work of the caller's stream behind the communication stream.
func (l *commStream) leave(caller *stream) error { return l.recordAndWait(caller, l.ended) }

// recordAndWait records the event on the communication stream and makes the caller wait for it.
func (l *commStream) recordAndWait(caller *stream, e *event) error {
	if err := l.s.Record(e); err != nil {
		return err
	}
	return waitEvent(caller, e)
}

// waitEvent makes the caller's stream wait for the event, or the host if there is no stream.
func waitEvent(caller *stream, e *event) error {
	if caller == nil {
		return e.Sync()
	}
	return caller.Wait(e)
}

// waitRemote makes the communication stream wait for another rank's event.
func (l *commStream) waitRemote(e *C.uly_event) error {
	return l.d.result(C.plug_stream_wait(l.d.table, l.d.d, l.s.s, e))
}

// copy enqueues a copy between addresses that this GPU can access. dst and src are equal or do not
// overlap.
func (l *commStream) copy(dst, src uintptr, bytes int64) error {
	if bytes <= 0 || dst == src {
		return nil
	}
	return l.d.result(C.plug_copy_bytes(l.d.table, l.d.d, l.s.s, pointer(dst), pointer(src), C.int64_t(bytes)))
}

// maxCombined is the maximum number of blocks that one operation combines. Tests lower it.
var maxCombined = MaxRanks

// combine writes src[0] ∘ src[1] ∘ … to dst in this order, n elements each. With more than
// maxCombined blocks, dst must not be one of them.
func (l *commStream) combine(dst uintptr, src []uintptr, n int64, dtype tensor.DType, op comm.Op) error {
	if len(src) > maxCombined && dtype == tensor.BF16 {
		return status.Errorf(status.Unsupported, "a BF16 sum over %d ranks is not supported (at most %d); use F32",
			len(src), maxCombined)
	}
	part := min(len(src), maxCombined)
	if err := l.combineUpTo(dst, src[:part], n, dtype, op); err != nil {
		return err
	}
	for src = src[part:]; len(src) > 0; src = src[part:] {
		part = min(len(src), maxCombined-1)
		if err := l.combineUpTo(dst, append([]uintptr{dst}, src[:part]...), n, dtype, op); err != nil {
			return err
		}
	}
	return nil
}

// combineUpTo is combine for at most maxCombined blocks.
func (l *commStream) combineUpTo(dst uintptr, src []uintptr, n int64, dtype tensor.DType, op comm.Op) error {
	if n <= 0 || len(src) == 1 && dst == src[0] {
		return nil
	}
	a := (*C.uly_rank_sum)(l.d.args)
	*a = C.uly_rank_sum{}
	*(*uintptr)(unsafe.Pointer(&a.dst)) = dst
	for i, p := range src {
		*(*uintptr)(unsafe.Pointer(&a.src[i])) = p
	}
	a.n, a.ranks, a.dtype, a.how = C.int64_t(n), C.int32_t(len(src)), C.int32_t(dtype), C.int32_t(op)
	return l.d.result(C.plug_enqueue(l.d.table, l.d.d, l.s.s, C.ULY_OP_RANK_SUM, l.d.args, C.sizeof_uly_rank_sum))
}

// Addresses of device memory and of other ranks' memory are uintptr: the garbage collector does not
// own that memory, and packets contain the addresses.

func address(p unsafe.Pointer) uintptr { return uintptr(p) }

func pointer(a uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&a)) }

// request is an all-to-all in progress on a communication stream.
type request struct {
	l      *commStream
	caller *stream
	done   *event
	active bool
	// finish is called by Wait before it records done; nil if done is recorded
	finish func(*request) error
	staged stagedAllToAll // the state of finish
}

// request returns a request that is not in use.
func (l *commStream) request(caller *stream) (*request, error) {
	var r *request
	if n := len(l.spare); n > 0 {
		r, l.spare = l.spare[n-1], l.spare[:n-1]
	} else {
		done, err := l.d.newEvent(false)
		if err != nil {
			return nil, err
		}
		r = &request{l: l, done: done}
		l.requests = append(l.requests, r)
	}
	r.caller, r.active, r.finish = caller, true, nil
	return r, nil
}

// Wait orders later work of the caller's stream behind the all-to-all. With a nil stream it blocks
// until the all-to-all is complete.
func (r *request) Wait() error {
	if !r.active {
		return comm.ErrWaited()
	}
	r.active = false
	if r.finish != nil {
		if err := r.finish(r); err != nil {
			return err
		}
		if err := r.l.s.Record(r.done); err != nil {
			return err
		}
	}
	err := waitEvent(r.caller, r.done)
	r.caller = nil
	r.l.spare = append(r.l.spare, r)
	return err
}
