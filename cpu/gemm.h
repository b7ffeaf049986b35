// Arguments of the gemm kernel.
#pragma once
#include <stdint.h>

typedef struct {
  int64_t m, n, k;
  const float *a, *b, *bias; // a[i*ars + k*acs], b[k*brs + j*bcs], bias[j] or NULL
  float *c;                  // c[i*ldc + j]
  int64_t ars, acs, brs, bcs, ldc;
  int64_t accumulate;
  int64_t rows, columns; // of C in a task; task = row block * column blocks + column block
} gemm_args;

// Limits of the packing buffers, in elements: a task has at most ULY_GEMM_NC columns.
enum { ULY_GEMM_KC = 256, ULY_GEMM_MC = 192, ULY_GEMM_NC = 512 };
