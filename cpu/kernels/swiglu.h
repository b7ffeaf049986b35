// The gated activation of an MLP.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // y, gate, up; dense runs
  const void *gate, *up;
  void *y;
  int64_t bf16;
} swiglu_args;

typedef struct {
  uly_axes axes; // dgate, dup, gate, up, dy; dense runs
  const void *gate, *up;
  void *dy, *dgate, *dup;
  int64_t bf16, restore;
} swiglu_grad_args;
