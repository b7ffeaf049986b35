// Arguments of the gemm kernel.
#pragma once
#include <stdint.h>

typedef struct {
  int64_t bf16, round; // bf16: A, B and bias are BF16; round: C is
  int64_t m, n, k;
  const void *a, *b, *bias; // a[i*ars + k*acs], b[k*brs + j*bcs], bias[j] or NULL
  void *c;                  // c[i*ldc + j]
  int64_t ars, acs, brs, bcs, ldc;
  int64_t accumulate;
  int64_t rows, columns; // of C in a task; task = row block * column blocks + column block
} gemm_args;

// Limits of the packing buffers: floats, or pairs of BF16, along the inner axis; rows of A; columns
// of B, and so of a task. Where C is BF16 and the inner axis is cut into chunks, a task also keeps
// its sums in F32, which leaves room for ULY_GEMM_SUM_ROWS x ULY_GEMM_SUM_NC.
enum { ULY_GEMM_KC = 256, ULY_GEMM_MC = 192, ULY_GEMM_NC = 512, ULY_GEMM_SUM_ROWS = 384, ULY_GEMM_SUM_NC = 320 };
