package cuda

/*
#include <stdlib.h>
#include "bridge.h"
*/
import "C"

import (
	"runtime"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// align is the alignment of allocations, in bytes: what 16-byte loads and the libraries' tables of
// tensors like.
const align = 256

// Absent is the ordinal of a GPU that is not there. Its AttentionWorkspace, GatedDeltaSizes and
// AttentionKernel are those of a Hopper on which cuDNN serves; the plug-in needs no driver for
// them. Nothing else works on it.
const Absent = int(C.ULY_NO_GPU)

// Options choose a GPU and how it works.
type Options struct {
	Ordinal       int  // among the GPUs that this process sees, or Absent
	Deterministic bool // every result repeatable to the bit
	// "attention_forward=own,gemm=naive" pins rows of kernels; "" = the first that fits
	Kernels string
}

// Device is one GPU as one rank sees it. It serves one goroutine at a time, on whatever thread that
// runs.
type Device struct {
	device.Calls // the operations (ops.go)

	table *C.uly_cuda_api
	d     *C.uly_device // nil once closed and nothing lives on it
	info  device.Info
	more  Details
	args  unsafe.Pointer // argsBytes of C memory: the arguments of the call in progress
	pins  runtime.Pinner // host memory that the call in progress points to
	open  bool
	live  int // buffers, streams and events that are not closed
}

// Details is what a GPU is beyond device.Info.
type Details struct {
	Ordinal  int
	UUID     string // the same for two ranks that share a GPU
	Whole    int64  // bytes of memory, for all ranks on it
	Free     int64  // bytes, when it was opened
	SM       int    // 90 for compute capability 9.0
	Driver   int    // 13000 for CUDA 13.0
	Emulated bool   // no GPU: the host stands in, for tests
}

// argsBytes returns the bytes of the longest arguments of an operation.
func argsBytes() int64 {
	n := int64(C.sizeof_uly_rank_sum)
	for i := range device.Operations {
		n = max(n, device.Operations[i].Size)
	}
	return n
}

// Open opens a GPU. It fails with a sentence, and with ErrNoPlugin as its cause where there is no
// plug-in.
func Open(o Options) (*Device, error) {
	p, err := load()
	if err != nil {
		return nil, err
	}
	return p.open(o)
}

func (p *plugin) open(o Options) (*Device, error) {
	how, text := (*C.uly_open)(C.calloc(1, C.sizeof_uly_open)), (*C.char)(C.calloc(1, textLength))
	out := (*C.uly_info)(C.calloc(1, C.sizeof_uly_info))
	defer C.free(unsafe.Pointer(how))
	defer C.free(unsafe.Pointer(text))
	defer C.free(unsafe.Pointer(out))
	how.ordinal, how.deterministic = C.int32_t(o.Ordinal), flag(o.Deterministic)
	if o.Kernels != "" {
		how.kernels = C.CString(o.Kernels)
		defer C.free(unsafe.Pointer(how.kernels))
	}
	d := &Device{table: p.table, open: true}
	defer d.Back(d.Thread())
	if code := C.plug_open(p.table, how, &d.d, text, textLength); code != 0 {
		return nil, status.Errorf(status.Code(code), "%s", C.GoString(text))
	}
	d.args = C.calloc(1, C.size_t(argsBytes()))
	d.Calls = device.NewCalls(d.enqueue)
	if d.more.Ordinal = o.Ordinal; o.Ordinal == Absent {
		d.info = infoOf("a GPU that is not there", "none", 0)
		return d, nil
	}
	if code := C.plug_info(d.table, d.d, out); code != 0 {
		err := d.failed(code)
		d.Close()
		return nil, err
	}
	d.info = infoOf(C.GoString(&out.name[0]), C.GoString(&out.kernels[0]), int64(out.memory))
	d.more = Details{Ordinal: o.Ordinal, UUID: C.GoString(&out.uuid[0]), Whole: int64(out.memory), Free: int64(out.free), SM: int(out.sm), Driver: int(out.driver), Emulated: out.emulated != 0}
	return d, nil
}

func infoOf(name, kernels string, memory int64) device.Info {
	return device.Info{Kind: "cuda", Name: name, Kernels: kernels, Align: align, Place: tensor.CUDA,
		Compute: []tensor.DType{tensor.BF16, tensor.F32}, TokenMajor: true, AttentionHead: C.ULY_ATTENTION_HEAD, DeltaHead: C.ULY_DELTA_HEAD, Memory: memory}
}

// SharedBy says how many ranks compute on this GPU: each may have its part of the memory.
func (d *Device) SharedBy(ranks int) {
	d.info.Sharing, d.info.Memory = ranks, d.more.Whole/int64(ranks)
}

// Info says what the device is; Details says the rest.
func (d *Device) Info() device.Info { return d.info }
func (d *Device) Details() Details  { return d.more }

// SharesHostMemory reports that host memory may be used as the device's own, as only the stand-in
// of tests can.
func (d *Device) SharesHostMemory() bool { return d.more.Emulated }

// Close closes the device. What lives on it may be closed after it; the GPU is given back with the
// last of them.
func (d *Device) Close() {
	if d.open {
		d.open = false
		d.leave()
	}
}

// leave gives the GPU back when the device is closed and nothing lives on it.
func (d *Device) leave() {
	if d.open || d.live > 0 || d.d == nil {
		return
	}
	C.plug_close(d.table, d.d)
	C.free(d.args)
	d.d, d.args = nil, nil
}

// ended counts one of what lives on the device as closed.
func (d *Device) ended() {
	d.live--
	d.leave()
}

// usable is an error once the device is closed: nothing new is made on it, and nothing is enqueued.
func (d *Device) usable(op string) error {
	if !d.open {
		return status.Errorf(status.InvalidArgument, "cuda.%s: the device is closed", op)
	}
	return nil
}

// failed makes an error of a code that is not 0, with the sentence that the plug-in kept for it.
func (d *Device) failed(code C.int32_t) error {
	return status.Errorf(status.Code(code), "%s", C.GoString(C.plug_error(d.table, d.d)))
}

// result is nil for code 0.
func (d *Device) result(code C.int32_t) error {
	if code == 0 {
		return nil
	}
	return d.failed(code)
}

// buffer is memory of the GPU, or of the host where the GPU reaches it at full speed.
type buffer struct {
	d     *Device
	p     unsafe.Pointer
	bytes int64
	host  bool
}

func (b *buffer) Pointer() unsafe.Pointer { return b.p }
func (b *buffer) Bytes() int64            { return b.bytes }

// Free waits for what the GPU still does, and gives the memory back.
func (b *buffer) Free() {
	if b.p == nil {
		return
	}
	if b.host {
		C.plug_free_host(b.d.table, b.d.d, b.p)
	} else {
		C.plug_free(b.d.table, b.d.d, b.p)
	}
	b.p = nil
	b.d.ended()
}

// Alloc returns zeroed memory of the GPU.
func (d *Device) Alloc(bytes int64) (device.Buffer, error) { return d.alloc("Alloc", bytes, false) }

// AllocHost returns zeroed host memory that is pinned: copies to and from it do not stop the host.
func (d *Device) AllocHost(bytes int64) (device.Buffer, error) {
	return d.alloc("AllocHost", bytes, true)
}

func (d *Device) alloc(op string, bytes int64, host bool) (device.Buffer, error) {
	if err := d.usable(op); err != nil {
		return nil, err
	}
	if bytes < 0 {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: %d bytes: a size cannot be negative", op, bytes)
	}
	b := &buffer{d: d, bytes: bytes, host: host}
	var code C.int32_t
	if host {
		code = C.plug_alloc_host(d.table, d.d, C.int64_t(max(bytes, 1)), &b.p)
	} else {
		code = C.plug_alloc(d.table, d.d, C.int64_t(max(bytes, 1)), &b.p)
	}
	if code != 0 {
		return nil, d.failed(code)
	}
	d.live++
	return b, nil
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

var _ device.Device = (*Device)(nil)
