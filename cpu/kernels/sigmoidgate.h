// The gate on attention's output.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // y, x, gate; dense runs
  const void *x, *gate;
  void *y;
  int64_t bf16;
} sigmoid_gate_args;

typedef struct {
  uly_axes axes; // dx, dgate, x, gate, dy; dense runs
  const void *x, *gate, *dy;
  void *dx, *dgate;
  int64_t bf16;
} sigmoid_gate_grad_args;
