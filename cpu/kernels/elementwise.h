// Addition and scaling.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // dst, a, b; dense runs
  void *dst;
  const void *a, *b;
  int64_t bf16;
} add_args;

typedef struct {
  void *x;
  int64_t n, piece, bf16;
  float f;
} scale_args;
