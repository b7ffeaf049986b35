// Arguments of RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over n features: y = x·rstd·(w +
// centre) with rstd = 1/√(mean(x²) + eps). Row r is head r % heads of token r / heads; *_token and
// *_head are strides in elements.
#pragma once
#include <stdint.h>

typedef struct {
  const void *x, *w, *added; // with added, x + added is normalized and written to sum
  void *y, *sum;
  float *rstd;
  int64_t rows, heads, n, per_task, bf16; // per_task: rows
  int64_t x_token, x_head, y_token, y_head, added_token, added_head, sum_token, sum_head;
  double eps;
  float centre; // added to w
} norm_args;

typedef struct {
  const void *x, *w, *dy;
  void *dx;
  const float *rstd;
  float *dw, *partial; // dw [n] is added to; partial is as in column_args
  int64_t rows, heads, n, splits, bf16;
  int64_t x_token, x_head, dy_token, dy_head, dx_token, dx_head;
  int64_t add; // add to dx instead of writing it
  float centre;
} norm_grad_args;
