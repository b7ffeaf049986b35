package cuda

// #include "bridge.h"
import "C"

import (
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The constants of Go and C, and the layouts of the types in argument structs, must agree;
// otherwise this file does not compile. operations.h checks the sizes of the argument structs.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(tensor.Tensor{})-C.sizeof_uly_tensor]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.DType)-unsafe.Offsetof(C.uly_tensor{}.dtype)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.Where)-unsafe.Offsetof(C.uly_tensor{}.where)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.NDim)-unsafe.Offsetof(C.uly_tensor{}.ndim)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.Shape)-unsafe.Offsetof(C.uly_tensor{}.shape)]
	_ = [1]struct{}{}[unsafe.Offsetof(tensor.Tensor{}.Stride)-unsafe.Offsetof(C.uly_tensor{}.stride)]
	_ = [1]struct{}{}[unsafe.Sizeof(device.Range{})-C.sizeof_uly_range]
	_ = [1]struct{}{}[unsafe.Offsetof(device.Range{}.Hi)-unsafe.Offsetof(C.uly_range{}.hi)]
	_ = [1]struct{}{}[unsafe.Sizeof(device.Window{})-C.sizeof_uly_window]
	_ = [1]struct{}{}[unsafe.Offsetof(device.Window{}.Right)-unsafe.Offsetof(C.uly_window{}.right)]
	_ = [1]struct{}{}[unsafe.Sizeof([]int64{})-C.sizeof_uly_list]
	_ = [1]struct{}{}[unsafe.Sizeof([]device.Range{})-C.sizeof_uly_ranges]
	_ = [1]struct{}{}[len(device.Operations)-C.ULY_OP_RANK_SUM]

	_ = [1]struct{}{}[tensor.F32-C.ULY_F32]
	_ = [1]struct{}{}[tensor.BF16-C.ULY_BF16]
	_ = [1]struct{}{}[tensor.F16-C.ULY_F16]
	_ = [1]struct{}{}[tensor.F64-C.ULY_F64]
	_ = [1]struct{}{}[tensor.I32-C.ULY_I32]
	_ = [1]struct{}{}[tensor.I64-C.ULY_I64]
	_ = [1]struct{}{}[tensor.U8-C.ULY_U8]
	_ = [1]struct{}{}[tensor.Host-C.ULY_HOST]
	_ = [1]struct{}{}[tensor.CUDA-C.ULY_CUDA]

	_ = [1]struct{}{}[status.InvalidArgument-C.ULY_INVALID_ARGUMENT]
	_ = [1]struct{}{}[status.Unsupported-C.ULY_UNSUPPORTED]
	_ = [1]struct{}{}[status.OutOfMemory-C.ULY_OUT_OF_MEMORY]
	_ = [1]struct{}{}[status.Comm-C.ULY_COMM]
	_ = [1]struct{}{}[status.Device-C.ULY_DEVICE]
	_ = [1]struct{}{}[status.Internal-C.ULY_INTERNAL]
)
