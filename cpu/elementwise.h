// Addition and scaling.
#pragma once
#include "axes.h"

typedef struct {
  uly_axes axes; // dst, a, b; dense runs
  float *dst;
  const float *a, *b;
} add_args;

typedef struct {
  float *x;
  int64_t n, piece;
  float f;
} scale_args;
