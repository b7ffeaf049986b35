// Package device is the contract of a device: memory, streams, and the operations of training
// (ops.go, delta.go, experts.go). Package cpu, package cuda, the dry run and the test device
// implement it.
//
// An operation is enqueued on a Stream and returns. On the CPU it is complete when it returns. The
// operations of a stream run in order; Events are the only order between streams. When a call
// returns, the caller may use its argument struct and the host slices in it again. The memory of
// its tensors stays in use until the stream has run the operation. An operation allocates nothing:
// all memory that it needs is in its arguments, or was allocated when the device was opened. A
// device checks only what memory safety needs: types, shapes, and a dense last axis. Plans have
// checked everything else before.
//
// The host reads and writes memory of another device than the CPU (tensor.CUDA) only by operations.
// Copy to the host is complete after Sync.
//
// A result depends on the arguments alone and not on the number of workers: shapes alone decide how
// work is divided and in which order partial sums are added. Therefore attention is bitwise equal
// for every number of ranks.
//
// The operations are data, too (operations.go): Operations lists each operation with its argument
// struct and its tensors. A device that embeds Calls implements them all in one function.
package device

import (
	"strings"
	"unsafe"

	"ulysses/tensor"
)

// Info describes a device.
type Info struct {
	Kind    string // "cpu", "cuda"
	Name    string // the manufacturer's name
	Kernels string // the kernels in use: "avx512bf16", "avx512", "avx2", "neon", "portable"
	Workers int    // CPU threads that operations use
	Align   int64  // alignment of allocations, bytes
	Place   tensor.Place
	Compute []tensor.DType // types that activations may have; the preferred type is first
	// TokenMajor is true if attention is fastest on [T, H, D] in memory, false for [H, T, D].
	TokenMajor bool
	// LogitsBF16 is true if CrossEntropy accepts BF16 logits.
	LogitsBF16 bool
	Memory     int64 // bytes that this rank may use; 0 = the host's
	// Free is the bytes of Memory that were free when all ranks had opened their devices and
	// communicators. It is the same on all ranks. 0 = unknown.
	Free int64
	// Sharing is the number of ranks that share the device, including this rank. Each of them may
	// use Memory bytes. 0 = unknown.
	Sharing int

	// AttentionHead and DeltaHead are the widest heads that attention and the gated delta rule
	// support; 0 = any width. Plans refuse wider heads.
	AttentionHead, DeltaHead int64
	// AttentionRows is the largest number of queries, and of keys, of a call of attention; 0 = any
	AttentionRows int64
}

// Usable returns the bytes that this rank can allocate: Memory, or Free if that is less. 0 =
// unknown.
func (i Info) Usable() int64 {
	if i.Free > 0 {
		return min(i.Memory, i.Free)
	}
	return i.Memory
}

// KernelsIn returns the kernels that ranks must have in common for bitwise equal results in a
// compute type. Kernels whose name ends in bf16 differ from the others for BF16 only.
func (i Info) KernelsIn(compute tensor.DType) string {
	if compute == tensor.F32 {
		return strings.TrimSuffix(i.Kernels, "bf16")
	}
	return i.Kernels
}

// Buffer is memory of a device. It is valid until Free.
type Buffer interface {
	Pointer() unsafe.Pointer
	Bytes() int64
	Free()
}

// Stream is a queue of operations that run in order.
type Stream interface {
	// Sync waits until all enqueued operations have run. It returns the first error of them.
	Sync() error
	// Record records the event at this point of the stream. It may be recorded again.
	Record(Event) error
	// Wait makes the operations that are enqueued later wait for the last recording of the event
	// before this call, on any stream of the device. It has no effect for an event that was never
	// recorded.
	Wait(Event) error
	Close()
}

// Grouper is a Stream that runs small operations together. In a group, which Group(true) opens and
// Group(false) closes, no operation may read or write what another one writes, if both are Copy or
// Rope. All other operations of the stream keep their order.
type Grouper interface {
	Group(open bool) error
}

// Grouped calls f in a group, on streams that have groups.
func Grouped(s Stream, f func() error) error {
	g, ok := s.(Grouper)
	if !ok {
		return f()
	}
	if err := g.Group(true); err != nil {
		return err
	}
	err := f()
	if closed := g.Group(false); err == nil {
		err = closed
	}
	return err
}

// Event is a point in a stream.
type Event interface {
	Sync() error // makes the host wait for the last recording
	Close()
}

// Device is memory and operations. One rank owns it. It serves one goroutine at a time.
type Device interface {
	Info() Info
	Alloc(bytes int64) (Buffer, error) // zeroed; OutOfMemory names the bytes
	NewStream() (Stream, error)
	NewEvent() (Event, error)
	Close()
	Ops
}
