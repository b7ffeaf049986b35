// Package status has the codes of errors. The status of a C function, the code of a Go error and
// the exit code of the program are the same number.
package status

import (
	"errors"
	"fmt"
)

// Code is the result of an operation. The values are part of the C ABI and of the command line, and
// never change.
type Code int32

const (
	OK              Code = 0
	InvalidArgument Code = 1  // an argument of a call or of the command line is wrong
	InvalidConfig   Code = 2  // a job file, a config.json or data is wrong
	Unsupported     Code = 3  // valid, but not implemented; the message names it
	OutOfMemory     Code = 4  // the message names what does not fit and the setting to change
	Comm            Code = 5  // a rank is late, has failed, or has other arguments
	Device          Code = 6  // a device or its driver failed
	IO              Code = 7  // a file could not be read or written
	Numeric         Code = 8  // NaN or Inf where a finite number is required
	Internal        Code = 10 // a bug of this program, such as a panic
	Preempted       Code = 75 // stopped by the scheduler, with a checkpoint: run the job again
	NothingToRun    Code = 77 // a check without anything to check, such as without a GPU
)

var names = map[Code]string{
	OK: "ok", InvalidArgument: "invalid argument", InvalidConfig: "invalid configuration", Unsupported: "unsupported",
	OutOfMemory: "out of memory", Comm: "communication", Device: "device", IO: "input/output", Numeric: "numeric",
	Internal: "internal", Preempted: "preempted", NothingToRun: "nothing to run on",
}

// Known reports whether c is a code of this list. A process that ends with another code was killed,
// or a library has ended it.
func (c Code) Known() bool {
	_, ok := names[c]
	return ok
}

func (c Code) String() string {
	if n, ok := names[c]; ok {
		return n
	}
	return fmt.Sprintf("status %d", int32(c))
}

// Error is a message with a code. The message names the operation, the values and the fix.
type Error struct {
	Code   Code
	Text   string
	Err    error    // the cause; may be nil
	Faults []string // the texts of the faults that Text lists; nil = one fault
}

func (e *Error) Error() string { return e.Text }
func (e *Error) Unwrap() error { return e.Err }

// Errorf returns an error with a code. The message should read "operation: what is wrong, with
// values; fix". %w sets the cause.
func Errorf(c Code, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: c, Text: err.Error(), Err: errors.Unwrap(err)}
}

// Faults returns the texts of the faults that an error lists: its own text if it has no list, none
// for nil.
func Faults(err error) []string {
	if err == nil {
		return nil
	}
	for at := err; at != nil; at = errors.Unwrap(at) {
		if e, ok := at.(*Error); ok && e.Faults != nil {
			return e.Faults
		}
	}
	return []string{err.Error()}
}

// Of returns the code of an error: OK for nil, Internal for an error without a code.
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
