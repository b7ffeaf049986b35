// Package cpu implements device.Device on the CPU. C kernels, one source built for several
// instruction sets, run on a pool of goroutines. Results are bitwise equal for any number of
// workers. kernels.h describes how to add a kernel.
package cpu

/*
#include <stdlib.h>
#include <sys/mman.h>
#include "kernels/kernels.h"

// From here on memory comes from mmap in whole huge pages: page faults cost more than most operations do.
enum { ULY_HUGE = 2 << 20 };

// uly_alloc returns zeroed memory aligned to 64 bytes (to 2 MiB when large), or NULL.
static void *uly_alloc(int64_t bytes) {
	if (bytes < ULY_HUGE) {
		void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
		if (p) __builtin_memset(p, 0, (bytes + 63) / 64 * 64);
		return p;
	}
	if (bytes > INT64_MAX - 2 * (int64_t)ULY_HUGE) return NULL;
	int64_t size = (bytes + 4095) / 4096 * 4096;
	char *p = mmap(NULL, size + ULY_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) return NULL;
	int64_t head = -(uintptr_t)p & (ULY_HUGE - 1);
	if (head) munmap(p, head);
	if (ULY_HUGE - head) munmap(p + head + size, ULY_HUGE - head);
	madvise(p + head, size, MADV_HUGEPAGE);
	return p + head;
}

static void uly_free(void *p, int64_t bytes) {
	if (bytes < ULY_HUGE) free(p);
	else munmap(p, (bytes + 4095) / 4096 * 4096);
}
*/
import "C"

import (
	"runtime"
	"unsafe"

	"github.com/klauspost/cpuid/v2"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// align is the alignment of allocations, in bytes: a cache line, and the widest vector.
const align = 64

// Options choose the size and the kernels of a device.
type Options struct {
	// threads that operations use, the caller's included; 0 = the cores that the affinity mask
	// allows
	Workers int
	// "avx512bf16", "avx512", "avx2", "portable"; "" = what ULYSSES_ISA says, else the best by
	// CPUID
	ISA string
}

// Device is the CPU as one rank sees it. It serves one goroutine at a time.
type Device struct {
	table   *table
	workers int
	pool    *pool
	// the run in progress, in C memory so that no call moves a Go pointer across
	job     *C.uly_job
	args    unsafe.Pointer // ULY_ARGS_BYTES of C memory: the arguments of the run
	scratch unsafe.Pointer // workers x ULY_SCRATCH_BYTES
	work    func(worker int)
}

// New opens the CPU. An instruction set that this CPU lacks is Unsupported.
func New(o Options) (device.Device, error) {
	t, err := choose(o.ISA)
	if err != nil {
		return nil, err
	}
	n := o.Workers
	if n == 0 {
		n = runtime.NumCPU()
	}
	if n < 0 || n > 4096 {
		return nil, status.Errorf(status.InvalidArgument, "cpu.New: %d workers: use 1 to 4096, or 0 for all cores this process may use", n)
	}
	d := &Device{table: t, workers: n}
	d.job = (*C.uly_job)(C.uly_alloc(C.sizeof_uly_job))
	d.args = C.uly_alloc(C.ULY_ARGS_BYTES)
	d.scratch = C.uly_alloc(d.scratchBytes())
	if d.job == nil || d.args == nil || d.scratch == nil {
		d.Close()
		return nil, status.Errorf(status.OutOfMemory, "cpu.New: %d workers need %d bytes of scratch: use fewer", n, d.scratchBytes())
	}
	d.job.args, d.job.scratch = d.args, (*C.char)(d.scratch)
	d.work = func(worker int) { C.uly_work(d.job, C.int64_t(worker)) }
	d.pool = newPool(n)
	return d, nil
}

func (d *Device) scratchBytes() C.int64_t { return C.int64_t(d.workers) * C.ULY_SCRATCH_BYTES }

// Info says what the device is.
func (d *Device) Info() device.Info {
	return device.Info{Kind: "cpu", Name: cpuid.CPU.BrandName, Kernels: d.table.name, Workers: d.workers, Align: align,
		Place: tensor.Host, Compute: compute}
}

// Close gives back workers and scratch. Buffers stay valid until they are freed.
func (d *Device) Close() {
	if d.pool != nil {
		d.pool.close()
		d.pool = nil
	}
	for _, m := range []struct {
		p     unsafe.Pointer
		bytes C.int64_t
	}{{unsafe.Pointer(d.job), C.sizeof_uly_job}, {d.args, C.ULY_ARGS_BYTES}, {d.scratch, d.scratchBytes()}} {
		if m.p != nil {
			C.uly_free(m.p, m.bytes)
		}
	}
	d.job, d.args, d.scratch = nil, nil, nil
}

// run does the tasks 0..tasks-1 of a kernel with the arguments in d.args, and returns when all are
// done. The arguments are gone then. The collector does not look into d.args: an operation keeps
// alive what it was given until its kernels are done, for a caller may have no more use for it.
func (d *Device) run(kernel int, tasks int64) error {
	defer d.forget()
	return d.runKeeping(kernel, tasks)
}

// runKeeping leaves the arguments for the next run of the same operation, which must forget them in
// the end.
func (d *Device) runKeeping(kernel int, tasks int64) error {
	if tasks <= 0 {
		return nil
	}
	d.job.kernel, d.job.flush = d.table.kernel(kernel), C.uly_flushes(C.int32_t(kernel))
	d.job.tasks, d.job.next = C.int64_t(tasks), 0
	return d.pool.run(int(min(tasks, int64(d.workers)))-1, d.work)
}

// forget clears the arguments, which may point into the Go heap. Left behind, such a pointer would
// go stale and, when the next operation's takes its place, meet the collector's write barrier,
// which dies of it. Cleared as numbers, it meets none.
func (d *Device) forget() { clear(unsafe.Slice((*uint64)(d.args), C.ULY_ARGS_BYTES/8)) }

// buffer is memory outside the Go heap: kernels may keep pointers into it, and the collector never
// looks at it.
type buffer struct {
	p     unsafe.Pointer
	bytes int64
}

func (b *buffer) Pointer() unsafe.Pointer { return b.p }
func (b *buffer) Bytes() int64            { return b.bytes }

func (b *buffer) Free() {
	if b.p != nil {
		C.uly_free(b.p, C.int64_t(max(b.bytes, 1)))
		b.p = nil
	}
}

// Alloc returns zeroed memory, aligned to a cache line.
func (d *Device) Alloc(bytes int64) (device.Buffer, error) {
	if bytes < 0 {
		return nil, status.Errorf(status.InvalidArgument, "cpu.Alloc: %d bytes: a size cannot be negative", bytes)
	}
	p := C.uly_alloc(C.int64_t(max(bytes, 1)))
	if p == nil {
		return nil, status.Errorf(status.OutOfMemory, "cpu.Alloc: %d bytes: the system has no more; make the job smaller or use more ranks", bytes)
	}
	return &buffer{p, bytes}, nil
}

// compute are the types that activations may have.
var compute = []tensor.DType{tensor.F32, tensor.BF16}

// order is stream and event at once: operations are done when they return.
type order struct{}

func (order) Sync() error               { return nil }
func (order) Record(device.Event) error { return nil }
func (order) Wait(device.Event) error   { return nil }
func (order) Close()                    {}

// NewStream returns a stream; on this device all streams are the same.
func (d *Device) NewStream() (device.Stream, error) { return order{}, nil }

// NewEvent returns an event, which has always come.
func (d *Device) NewEvent() (device.Event, error) { return order{}, nil }

var _ device.Device = (*Device)(nil)
