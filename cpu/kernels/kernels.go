// Package kernels holds the C kernels of the CPU device; kernels.h is the place to start reading.
// The package imports no other package of the module. Compiling it takes more than a minute, and
// this way a change of Go code does not compile it again.
package kernels

/*
#cgo CFLAGS: -O3 -g1
#cgo LDFLAGS: -lm
#include "kernels.h"
*/
import "C"

import (
	"embed"
	"unsafe"
)

// The tables of kernels, each a uly_kernel[K_COUNT] (kernels.h). If the compiler's target does not
// have the instruction set, all entries are NULL.
var (
	AVX512BF16 = unsafe.Pointer(&C.uly_kernels_avx512bf16) // only the kernels of ULY_DOT_KERNELS
	AVX512     = unsafe.Pointer(&C.uly_kernels_avx512)
	AVX2       = unsafe.Pointer(&C.uly_kernels_avx2)
	NEON       = unsafe.Pointer(&C.uly_kernels_neon)
	Portable   = unsafe.Pointer(&C.uly_kernels_portable)
)

// The go tool builds a package again when one of its files has changed. It does not treat *.inc as
// sources, so they are named here. Their text does not become part of the binary.
//
//go:embed *.inc
var _ embed.FS

// The export exists for the build cache alone. With -buildmode=c-shared the go command caches a
// package of C code only if the package exports a function to C, because it looks for the generated
// header. Without it, every make lib compiles the kernels again, which takes 70 s.
//
//export ulyKernelsInCache
func ulyKernelsInCache() {}
