// Causal depthwise convolution with silu. A channel's values are made of that channel's alone, in
// one order, however channels are cut.
#pragma once
#include <stdint.h>

typedef struct {
  const void *x, *w, *before; // before NULL = zero
  void *y;
  const int64_t *cu; // [documents+1]
  int64_t documents, tokens, channels, width, bf16;
  int64_t x_row, before_row, y_row; // strides
  int64_t block, per;               // channels of a task, tokens of a task
} conv1d_args;

// conv1d_grad_args: a task is a block of channels, over all tokens.
typedef struct {
  const void *x, *w, *before, *dy;
  void *dx, *dbefore; // dbefore NULL = not wanted
  float *dw;
  const int64_t *cu; // of one document at least
  int64_t documents, channels, width, bf16;
  int64_t x_row, before_row, dy_row, dx_row, dbefore_row;
  int64_t block;
} conv1d_grad_args;

// CONV1D_BLOCK channels are a block at most, CONV1D_LEAST at least; any vector divides both.
// CONV1D_BYTES is what backward keeps of a channel and a tap: the weight, the sum of dw, that of a
// block of rows, and a row of the gradient before the activation.
enum { CONV1D_BLOCK = 256, CONV1D_LEAST = 16, CONV1D_BYTES = 4 + 8 + 4 + 4 };
