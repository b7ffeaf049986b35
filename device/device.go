// Package device is the contract that every device signs: memory, order, and about twenty coarse operations (ops.go).
//
// Operations enqueue on a stream and return; on the CPU they are done when they return. An operation allocates nothing: what it
// needs is in its arguments, or is a fixed scratch that the device made when it was opened. Arguments are checked at this edge
// only for what memory safety needs (types, shapes, dense last axes); plans have settled the rest before.
//
// Every result is a function of the arguments alone, never of the number of workers: work is split, and partial sums are added,
// in an order that shapes decide. That is what makes attention independent of the number of ranks, bit for bit.
package device

import (
	"unsafe"
)

// Info says what a device is.
type Info struct {
	Kind    string // "cpu", "cuda"
	Name    string // as the maker names it
	Kernels string // the kernel row in use: "avx512", "avx2", "portable"; ranks must agree on it
	Workers int    // CPU threads that operations use
	Align   int64  // bytes to which allocations are aligned
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
	Close()
}

// Device is memory and operations. One rank owns it; it serves one goroutine at a time.
type Device interface {
	Info() Info
	Alloc(bytes int64) (Buffer, error) // zeroed; OutOfMemory names the bytes
	NewStream() (Stream, error)
	Close()
	Ops
}
