// The differences between the two builds of the plug-in: nvcc compiles the sources for GPUs, and
// g++ compiles them with -DULY_EMULATED for the host. No other file tests ULY_EMULATED. This header
// includes no CUDA, so that headers with index arithmetic and their host tests can include it.
//
// ULY_CUDA_HEADER is the header with the CUDA language and runtime, LAUNCH, SHARED and the
// functions for GPU instructions that kernels call: gpu/cuda.h or emulated/cuda.h.
// ULY_WARPGROUPS_HEADER is the header with functions for the instructions of Hopper.
//
// Limits of the emulated build are small. Tests with small tensors therefore reach the code that
// handles more work than one grid, one scratch allocation or one panel of the delta rule.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#ifdef ULY_EMULATED

#define ULY_CUDA_HEADER "emulated/cuda.h"
#define ULY_WARPGROUPS_HEADER "emulated/warpgroups.h"
constexpr bool emulated = true;
// Tests set the variable to make every index 64-bit.
inline bool narrow_allowed() { return getenv("ULYSSES_EMULATED_WIDE") == nullptr; }

#else

#define ULY_CUDA_HEADER "gpu/cuda.h"
#define ULY_WARPGROUPS_HEADER "gpu/warpgroups.h"
constexpr bool emulated = false;
inline bool narrow_allowed() { return true; }

#endif

// Limit is a GPU's limit in the GPU build, and also in tests that launch the shapes of real models
// without running kernels (emulated/counts.h).
struct Limit {
  int64_t gpu, small;
  operator int64_t() const { return emulated && !getenv("ULYSSES_EMULATED_SKIP") ? small : gpu; }
};
constexpr Limit GRID_LIMIT = {INT32_MAX, 5};              // blocks of attention and the delta rule
constexpr Limit ELEMENTWISE_GRID_LIMIT = {1 << 20, 7};    // blocks of elementwise kernels (blocks_for)
constexpr Limit STREAM_SCRATCH = {64 << 20, 1 << 20};     // bytes of a stream's scratch
constexpr Limit DELTA_PANEL_BYTES = {2ll << 30, 1 << 18}; // workspace for a panel (delta_index.h)
// The gated delta rule's division into segments is made for this number of multiprocessors on every
// GPU, and for this time of a step between segments, in chunks of the scan (delta_index.h).
constexpr Limit DELTA_MULTIPROCESSORS = {132, 20}, DELTA_FOLD_CHUNKS = {2, 0};
