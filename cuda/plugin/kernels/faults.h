// Reporting invalid ids and targets from a kernel.
#pragma once

#include "plugin.h"

// Emulated, it is a function that the check for races leaves out.
#ifndef ULY_ATOMIC
#define ULY_ATOMIC __forceinline__
#endif

// report writes a fault with a single store. If two threads report faults concurrently, one of the
// faults is recorded completely.
__device__ ULY_ATOMIC void report(uly_fault *fault, int op, int32_t id, int64_t at) {
  static_assert(sizeof(uly_fault) == sizeof(uint4), "a fault is written with one store");
  *reinterpret_cast<uint4 *>(fault) =
      make_uint4((unsigned)op + 1, (unsigned)id, (unsigned)at, (unsigned)((uint64_t)at >> 32));
}
