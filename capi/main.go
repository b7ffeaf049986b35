// Command capi is libulysses.so, the C interface of Ulysses (ulysses.h), built with
// -buildmode=c-shared.
//
// A call passes two layers. gate.c has the functions that a host links: it clears the thread's
// error text and turns handles into numbers. export.go has the Go functions that gate.c calls: they
// recover from panics and write the error text. They call plain Go functions that take numbers and
// pointers, so tests can call these without C.
package main

/*
#cgo CFLAGS: -std=gnu11 -fvisibility=hidden
#include "message.h"
*/
import "C"

import (
	"regexp"
	"runtime/debug"
	"strings"
	"unsafe"

	"ulysses/internal/status"
)

//go:generate sh -c "cd .. && go run ./capi/generate"

func main() {}

// invalid is an argument that cannot be right.
func invalid(format string, args ...any) error {
	return status.Errorf(status.InvalidArgument, format, args...)
}

// unbuilt is what the header declares and nobody has built yet.
func unbuilt(format string, args ...any) error {
	return status.Errorf(status.Unsupported, format, args...)
}

// guarded runs the body of an export: a panic of ours, or a fault in memory that the caller named,
// is a status.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = status.Errorf(status.Internal, "libulysses: a fault of the library, or memory that cannot be read: %v", r)
		}
	}()
	return f()
}

// errorBytes is the size of a thread's error message.
const errorBytes = C.ULY_ERROR_BYTES

// internal are functions of packages below, by which their errors begin.
var internal = regexp.MustCompile(`\b(sp|gdn|comm|cuda|cpu|device|tensor|backends|libulysses)(\.[A-Za-z]+)*: `)

// finish leaves the text of an error in the thread's buffer and returns its code. What packages
// below say is of functions of theirs, which the host does not know: the text names the one that it
// has called.
func finish(op string, err error, text *C.char) C.int32_t {
	if err == nil {
		return 0
	}
	said := internal.ReplaceAllString(err.Error(), "")
	said = strings.ReplaceAll(said, "cu_seqlens_k", "kv_cu_seqlens")
	if !strings.Contains(said, op) {
		said = op + ": " + said
	}
	code := status.Of(err)
	if code == status.OK {
		code = status.Internal
	}
	room := unsafe.Slice((*byte)(unsafe.Pointer(text)), errorBytes)
	n := copy(room[:errorBytes-1], said)
	room[n] = 0
	return C.int32_t(code)
}

// read copies a struct in: one of an older header is shorter and gets zeros, one of a newer header
// may be longer by zeros alone.
func read[T any](op, name string, p unsafe.Pointer) (s T, err error) {
	if p == nil {
		return s, invalid("%s: %s is NULL: pass a struct that ULYSSES_INIT has prepared", op, name)
	}
	given, known := uintptr(*(*uint32)(p)), unsafe.Sizeof(s)
	// no header ended within a pointer
	if given < 4 || given%unsafe.Alignof(s) != 0 || given > 1<<16 {
		return s, invalid("%s: %s.struct_size is %d: set it to sizeof the struct (ULYSSES_INIT), %d here", op, name, given, known)
	}
	bytes := unsafe.Slice((*byte)(p), given)
	for i := known; i < given; i++ {
		if bytes[i] != 0 {
			return s, invalid("%s: %s.struct_size is %d, this library knows %d bytes and byte %d is not zero: a newer header's field that this library lacks",
				op, name, given, known, i)
		}
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&s)), known), bytes)
	return s, nil
}

// write copies a struct out, as much of it as the caller's header knows.
func write[T any](op, name string, p unsafe.Pointer, s *T) error {
	if p == nil {
		return invalid("%s: %s is NULL: pass a struct that ULYSSES_INIT has prepared", op, name)
	}
	given := uintptr(*(*uint32)(p))
	if given < 4 || given > 1<<16 {
		return invalid("%s: %s.struct_size is %d: set it to sizeof the struct (ULYSSES_INIT), %d here", op, name, given, unsafe.Sizeof(*s))
	}
	n := min(given, unsafe.Sizeof(*s))
	copy(unsafe.Slice((*byte)(p), n)[4:], unsafe.Slice((*byte)(unsafe.Pointer(s)), n)[4:])
	return nil
}

// at is element i of a caller's array.
func at[T any](p *T, i int) T { return unsafe.Slice(p, i+1)[i] }
