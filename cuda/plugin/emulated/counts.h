// Counts of kernel launches, for tests. If ULYSSES_EMULATED_LAUNCHES names a file, each launch
// appends a line to it:
//
//   kernel address grid threads shared multiply-adds read written
//
// address is the kernel's offset in the plug-in's file, grid a number of blocks, shared the bytes
// of dynamic shared memory. The last three columns are sums over all threads: fused multiply-adds
// (madd of instructions.h; a product on tensor cores consists of them), and bytes of device memory.
// Only the build of make cuda-races counts them; in the other build they are 0.
//
// With ULYSSES_EMULATED_SKIP=1 kernels are launched and counted but do not run, so that tests can
// use the shapes of real models.
#pragma once

#include "cuda.h"

namespace uly_emulated {

// counting reports whether launches are counted.
bool counting();
// skipped reports whether kernels do not run.
bool skipped();
// count_access adds an access of the running kernel to device memory.
void count_access(size_t bytes, bool write);
// count_launch appends the line of a kernel that has run, and resets the sums.
void count_launch(const Kernel &kernel, dim3 grid, dim3 block, size_t shared);

} // namespace uly_emulated
