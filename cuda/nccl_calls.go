package cuda

// #include "bridge.h"
import "C"

import (
	"bytes"
	"sync"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// realNCCL is the NCCL library that the plug-in has opened.
type realNCCL struct {
	l      *commStream
	life   sync.Mutex  // between an abort and the end of the handle
	handle *C.uly_nccl // nil before the start and once closed
	text   [textLength]byte
}

func (r *realNCCL) id() ([]byte, error) {
	id := make([]byte, C.ULY_NCCL_ID)
	return id, r.l.d.result(C.plug_nccl_id(r.l.d.table, r.l.d.d, (*C.char)(unsafe.Pointer(&id[0]))))
}

func (r *realNCCL) start(ranks, rank int, id []byte) error {
	if len(id) != C.ULY_NCCL_ID {
		return status.Errorf(status.Comm, "NCCL: an id of %d bytes, want %d; start all ranks with the same program",
			len(id), C.ULY_NCCL_ID)
	}
	return r.l.d.result(C.plug_nccl_init(r.l.d.table, r.l.d.d, (*C.char)(unsafe.Pointer(&id[0])), C.int32_t(ranks),
		C.int32_t(rank), &r.handle))
}

// err may be called on any goroutine. It has its own buffer for the text, because the device's
// buffer belongs to the goroutine that the device serves.
func (r *realNCCL) err() error {
	code := C.plug_nccl_error(r.l.d.table, r.l.d.d, r.handle, (*C.char)(unsafe.Pointer(&r.text[0])), textLength)
	if code == 0 {
		return nil
	}
	text, _, _ := bytes.Cut(r.text[:], []byte{0})
	return status.Errorf(status.Code(code), "%s", text)
}

func (r *realNCCL) abort() {
	r.life.Lock()
	defer r.life.Unlock()
	if r.handle != nil {
		C.plug_nccl_abort(r.l.d.table, r.l.d.d, r.handle)
	}
}

func (r *realNCCL) close() error {
	r.life.Lock()
	defer r.life.Unlock()
	if r.handle == nil {
		return nil
	}
	h := r.handle
	r.handle = nil
	return r.l.d.result(C.plug_nccl_close(r.l.d.table, r.l.d.d, h))
}

func (r *realNCCL) allToAll(dst uintptr, recvAt, recv []int64, src uintptr, sendAt, send []int64) error {
	at := func(v []int64) *C.int64_t { return (*C.int64_t)(unsafe.Pointer(&v[0])) }
	return r.l.d.result(C.plug_nccl_all_to_all(r.l.d.table, r.l.d.d, r.handle, r.l.s.s, pointer(dst), at(recvAt),
		at(recv), pointer(src), at(sendAt), at(send)))
}

func (r *realNCCL) allGather(dst, src uintptr, bytes int64) error {
	return r.l.d.result(C.plug_nccl_all_gather(r.l.d.table, r.l.d.d, r.handle, r.l.s.s, pointer(dst), pointer(src),
		C.int64_t(bytes)))
}

func (r *realNCCL) allReduce(t tensor.Tensor) error {
	return r.l.d.result(C.plug_nccl_all_reduce(r.l.d.table, r.l.d.d, r.handle, r.l.s.s, t.Data, C.int64_t(t.Numel()),
		C.int32_t(t.DType)))
}

func (r *realNCCL) reduceScatter(dst, src uintptr, n int64, dtype tensor.DType) error {
	return r.l.d.result(C.plug_nccl_reduce_scatter(r.l.d.table, r.l.d.d, r.handle, r.l.s.s, pointer(dst), pointer(src),
		C.int64_t(n), C.int32_t(dtype)))
}

func (r *realNCCL) broadcast(t tensor.Tensor, root int) error {
	return r.l.d.result(C.plug_nccl_broadcast(r.l.d.table, r.l.d.d, r.handle, r.l.s.s, t.Data, C.int64_t(t.Bytes()),
		C.int32_t(root)))
}

func (r *realNCCL) sendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	return r.l.d.result(C.plug_nccl_send_recv(r.l.d.table, r.l.d.d, r.handle, r.l.s.s, recv.Data, C.int64_t(size(recv)),
		C.int32_t(from), send.Data, C.int64_t(size(send)), C.int32_t(to)))
}

// ncclUse returns the use of the stream of a communicator. Priority needs kernels that start in the
// order of the calls (commStream).
func (d *Device) ncclUse(use streamUse) streamUse {
	var ordered C.int32_t
	if !d.open || C.plug_nccl_ordered(d.table, d.d, &ordered) != 0 || ordered == 0 {
		return forComm
	}
	return use
}

// HasNCCL reports whether the plug-in has found NCCL, and otherwise the reason why not.
func HasNCCL() (bool, string) {
	found, err := Probe()
	if err != nil {
		return false, err.Error()
	}
	for _, l := range found.Libraries {
		if l.Name == "NCCL" {
			return l.Effect == "" && l.Fix == "", l.Found
		}
	}
	return false, "this plug-in does not support NCCL"
}
