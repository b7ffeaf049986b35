// Package kernels is the C of the CPU device. It is a package of its own, which needs no other,
// because it takes a compiler minutes: so it is compiled once, and not again whenever Go code of
// the device, or beneath it, has changed.
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

// Tables, each a uly_kernel[K_COUNT] (kernels.h). One that this compiler's target cannot make is
// all zeros.
var (
	AVX512BF16 = unsafe.Pointer(&C.uly_kernels_avx512bf16) // ULY_DOT_KERNELS alone
	AVX512     = unsafe.Pointer(&C.uly_kernels_avx512)
	AVX2       = unsafe.Pointer(&C.uly_kernels_avx2)
	Portable   = unsafe.Pointer(&C.uly_kernels_portable)
)

// The go tool builds a package anew when a file that it knows has changed, and it does not know
// *.inc as C. Naming them here makes it look at them; nothing of them gets into the binary.
//
//go:embed *.inc
var _ embed.FS

// The export exists for the build cache alone. With -buildmode=c-shared the go command caches a
// package of C code only if the package exports a function to C, because it looks for the generated
// header. Without it, every make lib compiles the kernels again, which takes 70 s.
//
//export ulyKernelsInCache
func ulyKernelsInCache() {}
