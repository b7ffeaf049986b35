// The kernels that AVX512_BF16 makes faster: they multiply pairs of BF16 (VDPBF16PS). A device with
// this instruction set takes all other kernels from isa_avx512.c.
#if defined(__x86_64__)
#pragma GCC target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,fma,avx2,bmi,bmi2,prefer-vector-width=512")
#define ULY_AVX512
#define ULY_DOT
#define VW 16
#define ULY_TABLE uly_kernels_avx512bf16
#define ULY_ROWS ULY_DOT_KERNELS
#include "kernels.h"
#include "vec.h"
#include "kernels.inc"
#else
#include "kernels.h"
const uly_kernel uly_kernels_avx512bf16[K_COUNT];
#endif
