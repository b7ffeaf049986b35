// Package device is the contract that every device signs: memory, order, and about twenty coarse
// operations (ops.go).
//
// Operations enqueue on a stream and return; on the CPU they are done when they return. What a
// stream holds runs in order; streams are ordered among each other by events alone. An argument
// struct, and the host slices in it, may be used again as soon as the call returns; the memory of
// its tensors may not before the stream has come past. An operation allocates nothing: what it
// needs is in its arguments, or is a fixed scratch that the device made when it was opened.
// Arguments are checked at this edge only for what memory safety needs (types, shapes, dense last
// axes); plans have settled the rest before.
//
// Memory of another device than the CPU (tensor.CUDA) is reached by operations alone: Copy brings
// values to the host, and they are there after Sync.
//
// Every result is a function of the arguments alone, never of the number of workers: work is split,
// and partial sums are added, in an order that shapes decide. That is what makes attention
// independent of the number of ranks, bit for bit.
package device

import (
	"strings"
	"unsafe"

	"ulysses/tensor"
)

// Info says what a device is.
type Info struct {
	Kind    string // "cpu", "cuda"
	Name    string // as the maker names it
	Kernels string // the kernel row in use: "avx512bf16", "avx512", "avx2", "portable"
	Workers int    // CPU threads that operations use
	Align   int64  // bytes to which allocations are aligned
	Place   tensor.Place
	Compute []tensor.DType // types that activations may have, the preferred one first
	// TokenMajor says which layout attention's kernels like: [T, H, D] in memory, else head-major
	// [H, T, D].
	TokenMajor bool
	Memory     int64 // bytes that this rank may have; 0 = the host's
	// ranks that share it, this one among them, each with that much memory; 0 = nobody has looked
	Sharing int

	// The widest heads that attention and the gated delta rule serve; 0 = any. Plans refuse wider
	// ones.
	AttentionHead, DeltaHead int64
}

// KernelsIn is what ranks must agree on to have the same bits in a compute type. A row whose name
// ends in bf16 has kernels of its own for BF16 alone.
func (i Info) KernelsIn(compute tensor.DType) string {
	if compute == tensor.F32 {
		return strings.TrimSuffix(i.Kernels, "bf16")
	}
	return i.Kernels
}

// Buffer is memory of a device.
type Buffer interface {
	Pointer() unsafe.Pointer
	Bytes() int64
	Free()
}

// Stream is an order of execution.
type Stream interface {
	Sync() error // waits until everything enqueued has run; returns what went wrong meanwhile
	// Record puts a mark into the stream, Wait makes what is enqueued from here on wait for the
	// last mark that was recorded before this call, on any stream of the device. An event that was
	// never recorded holds nobody up.
	Record(Event) error
	Wait(Event) error
	Close()
}

// Event is a mark in a stream's order; it can be recorded again and again.
type Event interface {
	Sync() error // the host waits for the last mark
	Close()
}

// Device is memory and operations. One rank owns it; it serves one goroutine at a time.
type Device interface {
	Info() Info
	Alloc(bytes int64) (Buffer, error) // zeroed; OutOfMemory names the bytes
	NewStream() (Stream, error)
	NewEvent() (Event, error)
	Close()
	Ops
}
