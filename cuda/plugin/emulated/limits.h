// Limits of the emulated GPU.
#pragma once

namespace uly_emulated {

// Dynamic shared memory of a block, in bytes: without and with cudaFuncSetAttribute.
enum : int { DEFAULT_SHARED = 48 << 10, MOST_SHARED = 227 << 10 };

} // namespace uly_emulated
