// The instructions of Hopper for warp specialization (gpu/warpgroups.h), and the descriptors of
// operands in shared memory.
#pragma once

#include "build.h"

#include ULY_CUDA_HEADER
#include ULY_WARPGROUPS_HEADER

// panels returns the descriptor of an operand in shared memory, whose rows of 64 BF16 are swizzled
// (swizzled<64> in mma.h), in panels that begin at multiples of 1024 bytes and are `panel` bytes
// apart. `address` is that of the first row and column of the operand. (PTX ISA 8.7, "Matrix
// Descriptor Format".)
__device__ __forceinline__ uint64_t panels(uint32_t address, uint32_t panel) {
  const uint64_t swizzle = 1, eight_rows = 1024;
  return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(panel >> 4) << 16 | eight_rows >> 4 << 32 | swizzle << 62;
}
