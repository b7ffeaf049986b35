// Grids of kernels as PTX instructions.
#pragma once

#include <string>
#include <vector>

#include "../cuda.h"

namespace uly_emulated {
namespace ptx {

// run_grid runs the blocks of a kernel. It returns "" or an error.
std::string run_grid(const Kernel &kernel, dim3 grid, dim3 block, size_t shared,
                     const std::vector<Argument> &arguments);

} // namespace ptx
} // namespace uly_emulated
