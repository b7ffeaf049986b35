// The gated activation of an MLP.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // y, gate, up; dense runs
  const float *gate, *up;
  float *y;
} swiglu_args;

typedef struct {
  uly_axes axes; // dgate, dup, gate, up, dy; dense runs
  const float *gate, *up, *dy;
  float *dgate, *dup;
} swiglu_grad_args;
