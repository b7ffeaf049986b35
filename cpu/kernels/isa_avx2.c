// The kernels for AVX2 and FMA: 8 lanes, 16 registers.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,bmi,bmi2")
#define ULY_AVX2
#define VW 8
#define ULY_TABLE uly_kernels_avx2
#include "kernels.h"
#include "vec.h"
#include "kernels.inc"
#else
#include "kernels.h"
const uly_kernel uly_kernels_avx2[K_COUNT];
#endif
