// The kernels for AVX-512 F, DQ, BW, VL: 16 lanes, 32 registers.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,avx2,bmi,bmi2,prefer-vector-width=512")
#define ULY_AVX512
#define VW 16
#define ULY_TABLE uly_kernels_avx512
#include "kernels.h"
#include "vec.h"
#include "kernels.inc"
#else
#include "kernels.h"
const uly_kernel uly_kernels_avx512[K_COUNT];
#endif
