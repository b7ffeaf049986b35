// Package cpu implements device.Device on the CPU. C kernels, one source built for several
// instruction sets, run on a pool of goroutines. Results are bitwise equal for any number of
// workers. kernels.h describes how to add a kernel.
package cpu

/*
#include <stdlib.h>
#include <sys/mman.h>
#include "kernels/kernels.h"

// Memory of ULY_MAPPED bytes or more comes from mmap, whose pages are zero when they are used. From
// ULY_HUGE on it is aligned to huge pages, because page faults take longer than most operations.
// Pages of AArch64 have up to 64 KiB, and only whole pages can be unmapped.
enum { ULY_PAGE = 64 << 10, ULY_MAPPED = 256 << 10, ULY_HUGE = 2 << 20 };

static int64_t uly_pages(int64_t bytes) { return (bytes + ULY_PAGE - 1) / ULY_PAGE * ULY_PAGE; }

static void *uly_map(int64_t bytes) {
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

// uly_alloc returns zeroed memory aligned to 64 bytes (from ULY_MAPPED on to pages, from ULY_HUGE
// on to 2 MiB), or NULL. uly_free needs the same number of bytes.
static void *uly_alloc(int64_t bytes) {
	if (bytes < ULY_MAPPED) {
		void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
		if (p) __builtin_memset(p, 0, (bytes + 63) / 64 * 64);
		return p;
	}
	if (bytes < ULY_HUGE) return uly_map(uly_pages(bytes));
	if (bytes > INT64_MAX - 2 * (int64_t)ULY_HUGE) return NULL;
	int64_t size = uly_pages(bytes);
	char *p = uly_map(size + ULY_HUGE);
	if (!p) return NULL;
	int64_t head = -(uintptr_t)p & (ULY_HUGE - 1);
	if (head) munmap(p, head);
	if (ULY_HUGE - head) munmap(p + head + size, ULY_HUGE - head);
	madvise(p + head, size, MADV_HUGEPAGE);
	return p + head;
}

static void uly_free(void *p, int64_t bytes) {
	if (bytes < ULY_MAPPED) free(p);
	else if (p) munmap(p, uly_pages(bytes));
}
*/
import "C"

import (
	"runtime"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// align is the alignment of allocations, in bytes: a cache line, and the widest vector.
const align = 64

// Options choose the size and the kernels of a device.
type Options struct {
	// number of threads of an operation, including the caller's; 0 = the number of cores that the
	// process may use
	Workers int
	// "avx512bf16", "avx512", "avx2", "neon" or "portable"; "" = the value of ULYSSES_ISA, or the
	// best set that the CPU has
	ISA string
}

// Device is the CPU as the device of one rank. It serves one goroutine at a time. Its streams are
// synchronous: operations end before they return.
type Device struct {
	table   *table
	workers int
	pool    *pool
	// The run in progress. It is in C memory, so no Go pointer is passed to C.
	job     *C.uly_job
	args    unsafe.Pointer // ULY_ARGS_BYTES of C memory: the arguments of the run
	scratch unsafe.Pointer // workers x ULY_SCRATCH_BYTES
	work    func(worker int)
	grouped device.Gemm // a product of GroupedGemm, kept here so that calls allocate nothing
}

// New opens the CPU. If the CPU does not have the instruction set, the error is Unsupported.
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
		return nil, status.Errorf(status.InvalidArgument,
			"cpu.New: %d workers; use 1 to 4096, or 0 for all cores that this process may use", n)
	}
	d := &Device{table: t, workers: n}
	d.job = (*C.uly_job)(C.uly_alloc(C.sizeof_uly_job))
	d.args = C.uly_alloc(C.ULY_ARGS_BYTES)
	d.scratch = C.uly_alloc(d.scratchBytes())
	if d.job == nil || d.args == nil || d.scratch == nil {
		d.Close()
		return nil, status.Errorf(status.OutOfMemory,
			"cpu.New: no memory for the scratch of %d workers, %d bytes; use fewer workers", n, d.scratchBytes())
	}
	d.job.args, d.job.scratch = d.args, (*C.char)(d.scratch)
	d.work = func(worker int) { C.uly_work(d.job, C.int64_t(worker)) }
	d.pool = newPool(n)
	return d, nil
}

func (d *Device) scratchBytes() C.int64_t { return C.int64_t(d.workers) * C.ULY_SCRATCH_BYTES }

// Info describes the device.
func (d *Device) Info() device.Info {
	return device.Info{Kind: "cpu", Name: proc.Processor(), Kernels: d.table.name, Workers: d.workers, Align: align,
		Place: tensor.Host, Compute: compute, AttentionRows: maxAttentionRows}
}

// Close ends the workers and frees the scratch. Buffers stay valid until they are freed.
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

// run runs tasks 0 to tasks-1 of a kernel with the arguments in d.args, waits for them and clears
// the arguments. The garbage collector does not scan d.args. Therefore each operation keeps its
// operands alive until its kernels have ended (runtime.KeepAlive): the caller may hold no other
// reference to them.
func (d *Device) run(kernel int, tasks int64) error {
	defer d.forget()
	return d.runKeeping(kernel, tasks)
}

// runKeeping is run without clearing the arguments, for operations of several runs. Such an
// operation calls forget at its end.
func (d *Device) runKeeping(kernel int, tasks int64) error {
	if tasks <= 0 {
		return nil
	}
	d.job.kernel, d.job.flush = d.table.kernel(kernel), C.uly_flushes(C.int32_t(kernel))
	d.job.tasks, d.job.next = C.int64_t(tasks), 0
	return d.pool.run(int(min(tasks, int64(d.workers)))-1, d.work)
}

// forget clears the arguments, which may point into the Go heap. A stale pointer would crash the
// write barrier of the garbage collector when the next operation overwrites it. Clearing them as
// numbers uses no write barrier.
func (d *Device) forget() { clear(unsafe.Slice((*uint64)(d.args), C.ULY_ARGS_BYTES/8)) }

// buffer is memory outside of the Go heap.
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
		return nil, status.Errorf(status.InvalidArgument, "cpu.Alloc: %d bytes; a size must not be negative", bytes)
	}
	p := C.uly_alloc(C.int64_t(max(bytes, 1)))
	if p == nil {
		fix := "make the job smaller or use more ranks"
		if limit := proc.AddressLimit(); limit > 0 {
			fix = "the address space of a process is limited to " + units.GiB(limit) +
				": raise the limit (ulimit -v, or h_vmem of Grid Engine), or " + fix
		}
		return nil, status.Errorf(status.OutOfMemory, "cpu.Alloc: the system has no memory for %d bytes; %s", bytes, fix)
	}
	return &buffer{p, bytes}, nil
}

// compute are the compute types that the kernels support.
var compute = []tensor.DType{tensor.F32, tensor.BF16}

// order is a stream and an event. Its methods do nothing, because operations have ended when they
// return.
type order struct{}

func (order) Sync() error               { return nil }
func (order) Record(device.Event) error { return nil }
func (order) Wait(device.Event) error   { return nil }
func (order) Close()                    {}

// NewStream returns a stream. All streams of this device are the same.
func (d *Device) NewStream() (device.Stream, error) { return order{}, nil }

// NewEvent returns an event, which is always complete.
func (d *Device) NewEvent() (device.Event, error) { return order{}, nil }

var _ device.Device = (*Device)(nil)
