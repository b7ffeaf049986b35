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

// commStream is the communication stream: the stream on which communicators copy, exchange and
// reduce. Events alone order it and the streams on which callers compute. An operation runs after
// everything that the caller's stream holds (enter), and everything that is enqueued there later
// runs after the operation (leave). With a nil stream, the tensors must be ready, and the call
// blocks until the operation is complete.
//
// All communicators of a device share one stream, because a stream has its own scratch memory, and
// because kernels of NCCL wait on the GPU for their peers: those of two communicators could
// deadlock if ranks ran them in different orders.
type commStream struct {
	d     *Device
	s     *stream
	came  *event // what the caller's stream held when the operation began
	left  *event // the end of an operation that its call waits for
	spare []*request
}

func newCommStream(d *Device) (*commStream, error) {
	l := &commStream{d: d}
	var err error
	if l.s, err = takeStream(d); err != nil {
		return nil, err
	}
	if l.came, err = d.newEvent(false); err == nil {
		l.left, err = d.newEvent(false)
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// close waits for what the communication stream holds.
func (l *commStream) close() error {
	var err error
	if l.d.open && l.s.s != nil {
		err = l.s.Sync()
	}
	for _, e := range []*event{l.came, l.left} {
		if e != nil {
			e.Close()
		}
	}
	for _, r := range l.spare {
		r.done.Close()
	}
	l.spare = nil
	giveStream(l.d)
	return err
}

// streams are those of the devices that have communicators.
var streams = struct {
	sync.Mutex
	by map[*Device]*sharedStream
}{by: map[*Device]*sharedStream{}}

type sharedStream struct {
	s     *stream
	users int
}

func takeStream(d *Device) (*stream, error) {
	streams.Lock()
	defer streams.Unlock()
	x := streams.by[d]
	if x == nil {
		s, err := d.newStream()
		if err != nil {
			return nil, err
		}
		x = &sharedStream{s: s}
		streams.by[d] = x
	}
	x.users++
	return x.s, nil
}

func giveStream(d *Device) {
	streams.Lock()
	defer streams.Unlock()
	x := streams.by[d]
	if x.users--; x.users == 0 {
		delete(streams.by, d)
		x.s.Close()
	}
}

// enter orders the communication stream behind what s holds. The caller's stream is nil where s is.
func (l *commStream) enter(op string, s device.Stream) (caller *stream, err error) {
	from := l.s
	if s != nil {
		if caller, err = l.d.of(op, s); err != nil {
			return nil, err
		}
		from = caller
	}
	if err := from.Record(l.came); err != nil || caller == nil {
		return nil, err
	}
	return caller, l.s.Wait(l.came)
}

// leave orders what comes later on the caller's stream behind the communication stream.
func (l *commStream) leave(caller *stream) error { return l.meet(caller, l.left) }

// meet marks the communication stream with the event, and makes the caller wait for it.
func (l *commStream) meet(caller *stream, e *event) error {
	if err := l.s.Record(e); err != nil {
		return err
	}
	return reach(caller, e)
}

// reach makes the caller's stream wait for the event, or the host where there is none.
func reach(caller *stream, e *event) error {
	if caller == nil {
		return e.Sync()
	}
	return caller.Wait(e)
}

// await makes the communication stream wait for another rank's event.
func (l *commStream) await(e *C.uly_event) error {
	return l.d.result(C.plug_stream_wait(l.d.table, l.d.d, l.s.s, e))
}

// copy moves bytes between memory that this GPU reaches; overlapping places are the same place.
func (l *commStream) copy(dst, src uintptr, bytes int64) error {
	if bytes <= 0 || dst == src {
		return nil
	}
	return l.d.result(C.plug_copy_bytes(l.d.table, l.d.d, l.s.s, pointer(dst), pointer(src), C.int64_t(bytes)))
}

// mostCombined is how many parts one operation combines. Tests make it small.
var mostCombined = MaxRanks

// combine writes src[0] ∘ src[1] ∘ … in that order, n elements each. Of more than mostCombined none
// may be dst.
func (l *commStream) combine(dst uintptr, src []uintptr, n int64, dtype tensor.DType, op comm.Op) error {
	if len(src) > mostCombined && dtype == tensor.BF16 {
		return status.Errorf(status.Unsupported, "a sum in BF16 over %d ranks, rounded once, is built for %d at most: use F32", len(src), mostCombined)
	}
	part := min(len(src), mostCombined)
	if err := l.combineSome(dst, src[:part], n, dtype, op); err != nil {
		return err
	}
	for src = src[part:]; len(src) > 0; src = src[part:] {
		part = min(len(src), mostCombined-1)
		if err := l.combineSome(dst, append([]uintptr{dst}, src[:part]...), n, dtype, op); err != nil {
			return err
		}
	}
	return nil
}

func (l *commStream) combineSome(dst uintptr, src []uintptr, n int64, dtype tensor.DType, op comm.Op) error {
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

// Addresses of other ranks' memory are numbers here: the collector need not know of them, and a
// packet carries them.

func number(p unsafe.Pointer) uintptr { return uintptr(p) }

func pointer(a uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&a)) }

// request is an exchange under way on a communication stream.
type request struct {
	l      *commStream
	caller *stream
	done   *event
	active bool
	// what is left for Wait to do before the mark; nil when it is set already
	finish func(*request) error
	staged stagedExchange // finish's
}

// request takes one that is not in use.
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
	}
	r.caller, r.active, r.finish = caller, true, nil
	return r, nil
}

// Wait orders what comes later on the caller's stream behind the exchange. It is called once.
func (r *request) Wait() error {
	if !r.active {
		return status.Errorf(status.InvalidArgument, "comm.AllToAll: the request has been waited for already")
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
	err := reach(r.caller, r.done)
	r.caller = nil
	r.l.spare = append(r.l.spare, r)
	return err
}
