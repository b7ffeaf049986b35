// The differences between the two builds of the plug-in: nvcc compiles the sources for GPUs, and
// g++ compiles them with -DULY_EMULATED for the host. No other file tests ULY_EMULATED. This header
// includes no CUDA, so that headers with index arithmetic and their host tests can include it.
//
// ULY_CUDA_HEADER is the header with the CUDA language and runtime, LAUNCH, SHARED and the
// functions for GPU instructions that kernels call: gpu/cuda.h or emulated/cuda.h.
//
// The limits of the emulated build are small. Tests with small tensors therefore reach the code
// that handles more work than one grid, one scratch allocation or one panel of the delta rule.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#ifdef ULY_EMULATED

#define ULY_CUDA_HEADER "emulated/cuda.h"
constexpr bool emulated = true;
constexpr int64_t GRID_LIMIT = 5; // blocks of attention and the delta rule
// blocks in a grid of elementwise kernels (blocks_for)
constexpr int64_t ELEMENTWISE_GRID_LIMIT = 7;
constexpr int64_t STREAM_SCRATCH = 1 << 20;    // bytes of a stream's scratch
constexpr int64_t DELTA_PANEL_BYTES = 1 << 15; // workspace for a panel (delta_index.h)
// Tests set the variable to make every index 64-bit.
inline bool narrow_allowed() { return getenv("ULYSSES_EMULATED_WIDE") == nullptr; }

#else

#define ULY_CUDA_HEADER "gpu/cuda.h"
constexpr bool emulated = false;
constexpr int64_t GRID_LIMIT = INT32_MAX;
constexpr int64_t ELEMENTWISE_GRID_LIMIT = 1 << 20;
constexpr int64_t STREAM_SCRATCH = 64 << 20;
constexpr int64_t DELTA_PANEL_BYTES = 2ll << 30;
inline bool narrow_allowed() { return true; }

#endif
