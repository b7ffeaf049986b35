// Rotary position embedding.
#pragma once
#include <stdint.h>

typedef struct {
  const int32_t *positions;
  const float *freq;
  float *cos, *sin;          // [tokens, half]
  int64_t tokens, half, per; // per: tokens of a task
  double scale;
} rope_table_args;

typedef struct {
  const void *x;
  const float *cos, *sin;
  void *y;
  int64_t tokens, heads, dim, half, per, bf16;
  int64_t x_token, x_head, y_token, y_head; // strides
  const void *w;                            // [dim] of the norm, NULL = none
  float *rstd;                              // [tokens, heads]
  int64_t rstd_token;
  double eps;
  float centre, sign; // sign: of the sine: -1 turns back
} rope_args;
