// RMSNorm times silu of a gate, on rows numbered as norm.h's.
#pragma once
#include <stdint.h>

typedef struct {
  const void *x, *gate, *w;
  void *y;
  float *rstd;
  int64_t rows, heads, n, per, bf16;                               // per: rows of a task
  int64_t x_token, x_head, gate_token, gate_head, y_token, y_head; // strides
  double eps;
} gated_norm_args;

typedef struct {
  const void *x, *gate, *w, *dy;
  void *dx, *dgate;
  const float *rstd;
  float *dw, *partial; // partial: as in column_args
  int64_t rows, heads, n, parts, bf16;
  int64_t x_token, x_head, gate_token, gate_head, dy_token, dy_head, dx_token, dx_head, dgate_token, dgate_head;
} gated_norm_grad_args;
