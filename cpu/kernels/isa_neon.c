// The kernels for AArch64: NEON with fused multiply-add, 4 lanes, 32 registers.
#if defined(__aarch64__)
#define ULY_NEON
#define VW 4
#define ULY_TABLE uly_kernels_neon
#include "kernels.h"
#include "vec.h"
#include "kernels.inc"
#else
#include "kernels.h"
const uly_kernel uly_kernels_neon[K_COUNT];
#endif
