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

// align is the alignment of allocations in bytes. Loads of 16 bytes and the libraries' descriptors
// of tensors need at most this alignment.
const align = 256

// Absent is the ordinal of an absent GPU. AttentionWorkspace, GatedDeltaSizes and AttentionKernel
// return what they return for a Hopper GPU with cuDNN, and need no driver. All other methods fail.
const Absent = int(C.ULY_NO_GPU)

// Options select a GPU and its kernels.
type Options struct {
	Ordinal       int  // a GPU of this process, numbered from 0, or Absent
	Deterministic bool // every result must be bitwise reproducible
	// Kernels selects kernels by name, such as "attention_forward=own,gemm=naive"; "" selects the
	// first kernel that supports each call.
	Kernels string
}

// Device is a GPU of one rank. It must be used by one goroutine at a time, on any thread.
type Device struct {
	device.Calls // the operations (ops.go)

	table *C.uly_cuda_api
	d     *C.uly_device // nil after Close, when all buffers, streams and events are closed
	info  device.Info
	more  Details
	args  unsafe.Pointer // argsBytes() of C memory: the arguments of the current call
	pins  runtime.Pinner // host memory that the current call points to
	open  bool
	// Options.Deterministic
	deterministic bool
	live          int // open buffers, streams and events
}

// Details describes a GPU beyond device.Info.
type Details struct {
	Ordinal  int
	UUID     string // equal for two ranks that share a GPU
	Whole    int64  // bytes of memory, shared by all ranks on the GPU
	Free     int64  // bytes, at Open
	SM       int    // 90 for compute capability 9.0
	Driver   int    // 13000 for CUDA 13.0
	Emulated bool   // the host emulates a GPU, for tests
}

// argsBytes returns the bytes of the longest arguments of an operation.
func argsBytes() int64 {
	n := int64(C.sizeof_uly_rank_sum)
	for i := range device.Operations {
		n = max(n, device.Operations[i].Size)
	}
	return n
}

// Open opens a GPU. If there is no plug-in, the error wraps ErrNoPlugin.
func Open(o Options) (*Device, error) {
	p, err := load()
	if err != nil {
		return nil, err
	}
	return p.open(o)
}

func (p *plugin) open(o Options) (*Device, error) {
	if int(int32(o.Ordinal)) != o.Ordinal { // the plug-in's type
		return nil, status.Errorf(status.InvalidArgument, "GPU %d does not exist: GPUs are numbered from 0", o.Ordinal)
	}
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
	d := &Device{table: p.table, open: true, deterministic: o.Deterministic}
	defer d.RestoreContext(d.SaveContext())
	if code := C.plug_open(p.table, how, &d.d, text, textLength); code != 0 {
		return nil, status.Errorf(status.Code(code), "%s", C.GoString(text))
	}
	d.args = C.calloc(1, C.size_t(argsBytes()))
	d.Calls = device.NewCalls(d.enqueue)
	if d.more.Ordinal = o.Ordinal; o.Ordinal == Absent {
		d.info = infoOf("an absent GPU", "none", 0)
		return d, nil
	}
	if code := C.plug_info(d.table, d.d, out); code != 0 {
		err := d.failed(code)
		d.Close()
		return nil, err
	}
	kernels := C.GoString(&out.kernels[0])
	if o.Kernels != "" { // here, because out has no space for a long text
		kernels += ", " + o.Kernels
	}
	d.info = infoOf(C.GoString(&out.name[0]), kernels, int64(out.memory))
	d.more = Details{Ordinal: o.Ordinal, UUID: C.GoString(&out.uuid[0]), Whole: int64(out.memory),
		Free: int64(out.free), SM: int(out.sm), Driver: int(out.driver), Emulated: out.emulated != 0}
	return d, nil
}

func infoOf(name, kernels string, memory int64) device.Info {
	return device.Info{Kind: "cuda", Name: name, Kernels: kernels, Align: align, Place: tensor.CUDA,
		Compute: []tensor.DType{tensor.BF16, tensor.F32}, TokenMajor: true, LogitsBF16: true,
		AttentionHead: C.ULY_ATTENTION_HEAD, DeltaHead: C.ULY_DELTA_HEAD, Memory: memory}
}

// SharedBy sets the number of ranks that compute on this GPU and divides its memory among them.
func (d *Device) SharedBy(ranks int) {
	d.info.Sharing, d.info.Memory = ranks, d.more.Whole/int64(ranks)
}

// FreeMemory returns the bytes of the GPU that no process uses now.
func (d *Device) FreeMemory() (int64, error) {
	if err := d.usable("FreeMemory"); err != nil {
		return 0, err
	}
	out := (*C.uly_info)(C.calloc(1, C.sizeof_uly_info))
	defer C.free(unsafe.Pointer(out))
	err := d.result(C.plug_info(d.table, d.d, out))
	return int64(out.free), err
}

// SetFree sets Info.Free, for this rank's plan of memory.
func (d *Device) SetFree(bytes int64) { d.info.Free = bytes }

// Info returns the device's name, memory and kernels.
func (d *Device) Info() device.Info { return d.info }

// Details returns the properties of the GPU that Info lacks.
func (d *Device) Details() Details { return d.more }

// SharesHostMemory reports whether the device can use host memory as its own. Only the emulated GPU
// of tests can.
func (d *Device) SharesHostMemory() bool { return d.more.Emulated }

// Close closes the device. Its buffers, streams and events may be closed later; the last of them
// closes the GPU.
func (d *Device) Close() {
	if d.open {
		d.open = false
		d.leave()
	}
}

// leave closes the GPU if the device and all its buffers, streams and events are closed.
func (d *Device) leave() {
	if d.open || d.live > 0 || d.d == nil {
		return
	}
	C.plug_close(d.table, d.d)
	C.free(d.args)
	d.d, d.args = nil, nil
}

// ended records that a buffer, stream or event has been closed.
func (d *Device) ended() {
	d.live--
	d.leave()
}

// usable returns an error if the device is closed.
func (d *Device) usable(op string) error {
	if !d.open {
		return status.Errorf(status.InvalidArgument, "cuda.%s: the device is closed", op)
	}
	return nil
}

// failed converts a nonzero code to an error with the plug-in's message.
func (d *Device) failed(code C.int32_t) error {
	return status.Errorf(status.Code(code), "%s", C.GoString(C.plug_error(d.table, d.d)))
}

// result returns nil for code 0.
func (d *Device) result(code C.int32_t) error {
	if code == 0 {
		return nil
	}
	return d.failed(code)
}

// buffer is GPU memory, or pinned host memory.
type buffer struct {
	d     *Device
	p     unsafe.Pointer
	bytes int64
	host  bool
}

func (b *buffer) Pointer() unsafe.Pointer { return b.p }
func (b *buffer) Bytes() int64            { return b.bytes }

// Free waits for the GPU and frees the memory.
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

// AllocHost returns zeroed pinned host memory. Copies to and from pinned memory do not block the
// host: the GPU reads and writes it when the stream comes to the copy.
func (d *Device) AllocHost(bytes int64) (device.Buffer, error) {
	return d.alloc("AllocHost", bytes, true)
}

func (d *Device) alloc(op string, bytes int64, host bool) (device.Buffer, error) {
	if err := d.usable(op); err != nil {
		return nil, err
	}
	if bytes < 0 {
		return nil, status.Errorf(status.InvalidArgument, "cuda.%s: %d bytes: the size must not be negative", op, bytes)
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
