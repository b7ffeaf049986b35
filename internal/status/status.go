// Package status is the one table of outcomes: a Go code, a C value and a process exit code are the
// same number.
package status

import (
	"errors"
	"fmt"
)

// Code is the outcome of an operation. Values are part of the C ABI and of the command line; they
// never change.
type Code int32

const (
	OK              Code = 0
	InvalidArgument Code = 1 // a call or a command line that cannot be right
	InvalidConfig   Code = 2 // a job file, a config.json or data that cannot be right
	Unsupported     Code = 3 // right, but not built; refused by name
	// does not fit; the text names the component and the setting that helps
	OutOfMemory  Code = 4
	Comm         Code = 5  // a peer is late, dead or disagrees
	Device       Code = 6  // a device or its library failed
	IO           Code = 7  // a file could not be read or written
	Numeric      Code = 8  // NaN or infinity where a number is needed
	Internal     Code = 10 // a fault of ours: a recovered panic
	Preempted    Code = 75 // stopped in time with a checkpoint: requeue
	NothingToRun Code = 77 // a check that had nothing to run on, such as no GPU
)

var names = map[Code]string{
	OK: "ok", InvalidArgument: "invalid argument", InvalidConfig: "invalid configuration", Unsupported: "unsupported",
	OutOfMemory: "out of memory", Comm: "communication", Device: "device", IO: "input/output", Numeric: "numeric",
	Internal: "internal", Preempted: "preempted", NothingToRun: "nothing to run on",
}

func (c Code) String() string {
	if n, ok := names[c]; ok {
		return n
	}
	return fmt.Sprintf("status %d", int32(c))
}

// Error carries a code beside a sentence that names the operation, the values and the fix.
type Error struct {
	Code   Code
	Text   string
	Err    error // cause, may be nil
	Faults int   // number of faults that Text lists, a line each; 0 = one fault
}

func (e *Error) Error() string { return e.Text }
func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an error with a code. The text should read "operation: values; fix"; %w keeps a
// cause.
func Errorf(c Code, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: c, Text: err.Error(), Err: errors.Unwrap(err)}
}

// Faults returns the number of faults that an error lists: 1 if it is no list, 0 for nil.
func Faults(err error) int {
	if err == nil {
		return 0
	}
	for ; err != nil; err = errors.Unwrap(err) {
		if e, ok := err.(*Error); ok && e.Faults > 0 {
			return e.Faults
		}
	}
	return 1
}

// Of returns the code an error carries: OK for nil, Internal for one that carries none.
func Of(err error) Code {
	if err == nil {
		return OK
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return Internal
}
