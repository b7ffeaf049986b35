// Command capi is libulysses.so, the C interface of Ulysses (ulysses.h), built with
// -buildmode=c-shared.
//
// A call of the host passes through these files:
//
//   - gate.c has the functions that the host links. Each clears the thread's error message and
//     passes handles as integers. thread.c and signals.c block the host's signals during the call.
//   - export.go has the Go functions that gate.c calls. They recover from panics and write the
//     error message.
//   - The other Go files have the bodies of the calls. Their arguments are integers and pointers,
//     so tests call them without C.
//
// A body of a collective call runs inside onPlan or onContext (agree.go), which enter the context
// and let all ranks agree on errors. It reads its arguments with a reader (reader.go) and then
// calls package sp or gdn.
//
// The main types are context (one rank on one device), plan (one kind of layer), batch (lengths and
// documents), request (a reshard in progress) and pass (an overlapped pass in progress). Each has a
// handle in the table of handles.go.
package main

/*
#cgo CFLAGS: -std=gnu11 -fvisibility=hidden
#include "message.h"
*/
import "C"

import (
	"runtime/debug"
	"strings"
	"unsafe"

	"ulysses/internal/status"
)

//go:generate sh -c "cd .. && go run ./capi/generate"

func main() {}

// invalid returns an error with the status ULYSSES_INVALID_ARGUMENT.
func invalid(format string, args ...any) error {
	return status.Errorf(status.InvalidArgument, format, args...)
}

// unsupported returns an error with the status ULYSSES_UNSUPPORTED, for what the header declares
// and the library does not implement.
func unsupported(format string, args ...any) error {
	return status.Errorf(status.Unsupported, format, args...)
}

// guarded runs f. A panic, and a fault in memory that the caller has passed, become an error with
// the status ULYSSES_INTERNAL.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = status.Errorf(status.Internal,
				"libulysses: a bug of the library, or an argument in memory that cannot be read: %v", r)
		}
	}()
	return f()
}

// errorBytes is the size of the buffer of a thread's error message.
const errorBytes = C.ULY_ERROR_BYTES

// finish writes the message of an error to the thread's buffer and returns its status. Without an
// error it clears the buffer: a call that has failed inside a callback has left its message there.
// Messages of other packages name Go functions, which the host does not know: finish replaces them
// by op, the C function that the host has called.
func finish(op string, err error, buffer *C.char) C.int32_t {
	if err == nil {
		*buffer = 0
		return 0
	}
	message := status.WithoutGoNames(err)
	message = strings.ReplaceAll(message, "cu_seqlens_k", "kv_cu_seqlens")
	if !strings.Contains(message, op) {
		message = op + ": " + message
	}
	code := status.Of(err)
	if code == status.OK {
		code = status.Internal
	}
	dst := unsafe.Slice((*byte)(unsafe.Pointer(buffer)), errorBytes)
	dst[copy(dst[:errorBytes-1], message)] = 0
	return C.int32_t(code)
}

// readStruct copies a struct of the caller. A struct of an older header is shorter, and the missing
// fields are zero. A struct of a newer header is longer, and the additional bytes must be zero.
func readStruct[T any](op, name string, p unsafe.Pointer) (s T, err error) {
	if p == nil {
		return s, invalid("%s: %s is NULL; give a struct that ULYSSES_INIT has prepared", op, name)
	}
	given, known := uintptr(*(*uint32)(p)), unsafe.Sizeof(s)
	// every version of the struct ends at a multiple of its alignment
	if given < 4 || given%unsafe.Alignof(s) != 0 || given > 1<<16 {
		return s, invalid(
			"%s: %s.struct_size is %d; use ULYSSES_INIT, which sets it to the size of the struct, %d in this version",
			op, name, given, known)
	}
	bytes := unsafe.Slice((*byte)(p), given)
	for i := known; i < given; i++ {
		if bytes[i] != 0 {
			return s, invalid(
				"%s: %s.struct_size is %d, this library knows %d bytes, and byte %d is not zero: it belongs to a field of a newer header; set it to zero, or use a newer library",
				op, name, given, known, i)
		}
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&s)), known), bytes)
	return s, nil
}

// writeStruct copies a struct to the caller, up to the size that the caller's header has.
func writeStruct[T any](op, name string, p unsafe.Pointer, s *T) error {
	if p == nil {
		return invalid("%s: %s is NULL; give a struct that ULYSSES_INIT has prepared", op, name)
	}
	given := uintptr(*(*uint32)(p))
	if given < 4 || given > 1<<16 {
		return invalid("%s: %s.struct_size is %d; use ULYSSES_INIT, which sets it to the size of the struct, %d in this version",
			op, name, given, unsafe.Sizeof(*s))
	}
	n := min(given, unsafe.Sizeof(*s))
	copy(unsafe.Slice((*byte)(p), n)[4:], unsafe.Slice((*byte)(unsafe.Pointer(s)), n)[4:])
	return nil
}

// element returns element i of an array of the caller.
func element[T any](p *T, i int) T { return unsafe.Slice(p, i+1)[i] }
