// Package ownfile has the path of the file that contains this code: the program, or libulysses.so
// in a host program. Other files of an installation stand beside it.
package ownfile

/*
#cgo linux LDFLAGS: -ldl
#include "own.h"
*/
import "C"

// Path returns the absolute path of the file that contains this code, without symbolic links. It is
// the path at the time when the file was loaded: a relative path, as from LD_LIBRARY_PATH=lib, has
// another meaning after the host program has changed its folder. "" = unknown.
func Path() string { return C.GoString(C.uly_own_path()) }
