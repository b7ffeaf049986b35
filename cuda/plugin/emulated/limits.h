// Limits of the emulated GPU.
#pragma once

#include "settings.h"

namespace uly_emulated {

// Dynamic shared memory of a block, in bytes: without and with cudaFuncSetAttribute.
enum : int { DEFAULT_SHARED = 48 << 10 };
inline int most_shared() { return (int)setting("ULYSSES_EMULATED_SHARED", 227 << 10); }

} // namespace uly_emulated
