// RMSNorm, on rows numbered token·heads + head.
#pragma once
#include <stdint.h>

typedef struct {
  const float *x, *w;
  float *y, *rstd;
  int64_t rows, heads, n, per; // per: rows of a task
  int64_t x_token, x_head, y_token, y_head; // strides
  double eps;
  float centre; // added to w
} norm_args;

typedef struct {
  const float *x, *w, *rstd, *dy;
  float *dx, *dw, *partial; // partial: as in column_args
  int64_t rows, heads, n, parts;
  int64_t x_token, x_head, dy_token, dy_head, dx_token, dx_head;
  int64_t add; // to dx
  float centre;
} norm_grad_args;
