// Arguments of gated RMSNorm: y = x·rstd·w·silu(gate). Rows and strides are as in norm.h.
#pragma once
#include <stdint.h>

typedef struct {
  const void *x, *gate, *w;
  void *y;
  float *rstd;
  int64_t rows, heads, n, per_task, bf16; // per_task: rows
  int64_t x_token, x_head, gate_token, gate_head, y_token, y_head;
  double eps;
} gated_norm_args;

typedef struct {
  const void *x, *gate, *w, *dy;
  void *dx, *dgate;
  const float *rstd;
  float *dw, *partial; // dw [n] is added to; partial is as in column_args
  int64_t rows, heads, n, splits, bf16;
  int64_t x_token, x_head, gate_token, gate_head, dy_token, dy_head, dx_token, dx_head, dgate_token, dgate_head;
} gated_norm_grad_args;
