// Arguments of the matrix product C [m][n] = A [m][k]·B [k][n] (+ bias) (+ C). ars, acs, brs, bcs
// and ldc are strides in elements: row and column of A and of B, and row of C.
#pragma once
#include <stdint.h>

typedef struct {
  int64_t bf16, round; // bf16: A, B and bias are BF16; round: C is BF16
  int64_t m, n, k;
  const void *a, *b, *bias; // a[i*ars + k*acs], b[k*brs + j*bcs], bias[j] or NULL
  void *c;                  // c[i*ldc + j]
  int64_t ars, acs, brs, bcs, ldc;
  int64_t accumulate;    // add to C
  int64_t rows, columns; // block of C of a task; task = row block * column blocks + column block
} gemm_args;

// Sizes of the packed blocks: ULY_GEMM_KC floats or pairs of BF16 along the inner axis, ULY_GEMM_MC
// rows of A, ULY_GEMM_NC columns of B. A task has at most ULY_GEMM_NC columns. If C is BF16 and the
// inner axis has several chunks, the sums of a task are kept in F32; its block of C is then at most
// ULY_GEMM_SUM_ROWS x ULY_GEMM_SUM_NC.
enum { ULY_GEMM_KC = 256, ULY_GEMM_MC = 192, ULY_GEMM_NC = 512, ULY_GEMM_SUM_ROWS = 384, ULY_GEMM_SUM_NC = 320 };
