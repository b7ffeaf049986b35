// Counts of what a launch costs a GPU, by instruction: how often warps ran it, and the passes of
// its accesses to memory.
//
// If ULYSSES_EMULATED_TRAFFIC names a file, each launch of a kernel that is run as PTX instructions
// appends a line for each instruction that ran:
//
//   kernel symbol line source instruction runs passes least sectors least
//
// line is the line in the PTX file, source the place in the source, "-" without nvcc's -lineinfo.
// runs are warps with a lane that ran the instruction; barriers and branches are not counted.
// passes are clocks of the 32 banks of shared memory, of 4 bytes each: lanes with different words
// of one bank wait for each other. At best, 32 lanes with 4 bytes take part in a pass, 16 with 8 or
// 8 with 16. What wgmma reads from shared memory is not counted. sectors are 32 bytes of device
// memory. `least` is what the same bytes would take without conflicts, and contiguous.
#pragma once

#include "../cuda.h"
#include "warp.h"

namespace uly_emulated {
namespace ptx {

extern bool traffic_counted; // whether the instructions of the launch that runs are counted
// begin_counts sets traffic_counted, and the counts of a program to 0.
void begin_counts(const Program &p);
// count adds an instruction that w.now runs.
void count(Warp &w, const Instruction &i);
// write_counts appends the lines of a launch.
void write_counts(const Kernel &kernel, const std::string &symbol, const Program &p);

} // namespace ptx
} // namespace uly_emulated
