// Arguments of SwiGLU (Shazeer 2020, arXiv:2002.05202): y = silu(gate)·up, or another form. With
// restore, the backward pass writes y to dy.
#pragma once
#include "axes.h"

// Forms of SwiGLU, see device.SwiGLU.
enum { SWIGLU_SILU, SWIGLU_GELU, SWIGLU_CLAMPED };

typedef struct {
  uly_axes axes; // operands y, gate, up; the inner axis is dense
  const void *gate, *up;
  void *y;
  int64_t bf16, form;
} swiglu_args;

typedef struct {
  uly_axes axes; // operands dgate, dup, gate, up, dy; the inner axis is dense
  const void *gate, *up;
  void *dy, *dgate, *dup;
  int64_t bf16, restore, form;
} swiglu_grad_args;

// The gradient of weights[t]·y[t], with weights and their gradients dweights [rows]. *_row are
// strides of a row in elements. With restore, weights[t]·y[t] is written to dy.
typedef struct {
  const void *gate, *up;
  void *dy, *dgate, *dup;
  const float *weights;
  float *dweights;
  int64_t rows, n, per_task, gate_row, up_row, dy_row, dgate_row, dup_row, bf16, restore, form;
} swiglu_weighted_args;
