// ULY_CUDA_HEADER (build.h) of the GPU build: CUDA's headers, LAUNCH and SHARED, and the
// functions of instructions.h. The files of the same names in `emulated` have them in plain C++.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  (kernel)<<<(grid), (block), (shared), (stream)->s>>>(__VA_ARGS__)
// Tiles for tensor cores begin at a multiple of 512 bytes (moved in kernels/attention_mma.h).
#define SHARED(type, name)                                      \
  extern __shared__ __align__(1024) unsigned char uly_shared[]; \
  type *name = reinterpret_cast<type *>(uly_shared)

#ifdef __CUDACC__ // g++ compiles the host sources that call cuBLASLt and cuDNN
#include "gpu/instructions.h"
#endif
