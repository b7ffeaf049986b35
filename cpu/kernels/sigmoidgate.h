// Arguments of the gate on attention's output: y = x·sigmoid(gate).
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // operands y, x, gate; the inner axis is dense
  const void *x, *gate;
  void *y;
  int64_t bf16;
} sigmoid_gate_args;

typedef struct {
  uly_axes axes; // operands dx, dgate, x, gate, dy; the inner axis is dense
  const void *x, *gate, *dy;
  void *dx, *dgate;
  int64_t bf16;
} sigmoid_gate_grad_args;
