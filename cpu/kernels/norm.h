// RMSNorm, on rows numbered token·heads + head.
#pragma once
#include <stdint.h>

typedef struct {
  const void *x, *w;
  void *y;
  float *rstd;
  int64_t rows, heads, n, per, bf16;        // per: rows of a task
  int64_t x_token, x_head, y_token, y_head; // strides
  double eps;
  float centre; // added to w
} norm_args;

typedef struct {
  const void *x, *w, *dy;
  void *dx;
  const float *rstd;
  float *dw, *partial; // partial: as in column_args
  int64_t rows, heads, n, parts, bf16;
  int64_t x_token, x_head, dy_token, dy_head, dx_token, dx_head;
  int64_t add; // to dx
  float centre;
} norm_grad_args;
