// The gate on attention's output.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // y, x, gate; dense runs
  const float *x, *gate;
  float *y;
} sigmoid_gate_args;

typedef struct {
  uly_axes axes; // dx, dgate, x, gate, dy; dense runs
  const float *x, *gate, *dy;
  float *dx, *dgate;
} sigmoid_gate_grad_args;
