// The kernels in plain GCC vectors of 4 lanes: SSE2 on x86-64, NEON on AArch64, correct anywhere.
#define ULY_PORTABLE
#define VW 4
#define ULY_TABLE uly_kernels_portable
#include "kernels.h"
#include "vec.h"
#include "kernels.inc"
