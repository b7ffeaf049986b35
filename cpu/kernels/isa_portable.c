// The kernels in GCC's vector extension with 4 lanes: SSE2 on x86-64, NEON on AArch64. They run on
// every processor. Their tiles fit the 16 registers of SSE2.
#define ULY_PORTABLE
#define VW 4
#define ULY_TABLE uly_kernels_portable
#include "kernels.h"
#include "vec.h"
#include "kernels.inc"
