// Arguments of add (dst = a + b) and scale (x *= f).
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // operands dst, a, b; the inner axis is dense
  void *dst;
  const void *a, *b;
  int64_t bf16;
} add_args;

typedef struct {
  void *x;
  int64_t n, per_task, bf16; // elements in all, and of a task
  float f;
} scale_args;
