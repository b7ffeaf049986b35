// Arguments of SwiGLU (Shazeer 2020, arXiv:2002.05202): y = silu(gate)·up. With gelu it is
// gelu(gate)·up, in the approximation by tanh. With restore, the backward pass writes y to dy.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // operands y, gate, up; the inner axis is dense
  const void *gate, *up;
  void *y;
  int64_t bf16, gelu;
} swiglu_args;

typedef struct {
  uly_axes axes; // operands dgate, dup, gate, up, dy; the inner axis is dense
  const void *gate, *up;
  void *dy, *dgate, *dup;
  int64_t bf16, restore, gelu;
} swiglu_grad_args;
