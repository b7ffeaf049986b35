// Arguments of the causal depthwise convolution with silu: y[t][c] = silu(Σ_i w[c][i]·x[t - width +
// 1 + i][c]) over the taps i < width. Rows before a document are zero, except for the first
// document, which reads `before` [width-1][channels]. The results of a channel depend on that
// channel alone, in one order of additions, for any division into tasks.
#pragma once
#include <stdint.h>

typedef struct {
  const void *x, *w, *before; // [tokens][channels], [channels][width]; before NULL = zero
  void *y;                    // [tokens][channels]
  const int64_t *cu;          // [documents+1]
  int64_t documents, tokens, channels, width, bf16;
  int64_t x_row, before_row, y_row; // strides in elements
  int64_t block, per_task;          // channels of a task, tokens of a task
} conv1d_args;

// conv1d_grad_args: a task is a block of channels over all tokens. dw [channels][width] is added
// to.
typedef struct {
  const void *x, *w, *before, *dy;
  void *dx, *dbefore; // dbefore NULL = not wanted
  float *dw;
  const int64_t *cu; // [documents+1], documents >= 1
  int64_t documents, channels, width, bf16;
  int64_t x_row, before_row, dy_row, dx_row, dbefore_row;
  int64_t block;
} conv1d_grad_args;

// A block of channels has at most CONV1D_BLOCK and at least CONV1D_MIN_BLOCK channels; both are
// multiples of every vector width. CONV1D_CHANNEL_BYTES is the scratch of the backward pass for one
// channel and tap: the weight, the sum of dw, the sum of dw in a block of rows, and a row of the
// gradient before the activation.
enum { CONV1D_BLOCK = 256, CONV1D_MIN_BLOCK = 16, CONV1D_CHANNEL_BYTES = 4 + 8 + 4 + 4 };
