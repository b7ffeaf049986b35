// Arguments of the rotary position embedding (Su et al. 2021, arXiv:2104.09864). Feature i of a
// head is paired with feature half + i; features from 2·half on are copied.
#pragma once
#include <stdint.h>

typedef struct {
  const int32_t *positions;
  const float *freq;
  float *cos, *sin;               // [tokens, half]
  int64_t tokens, half, per_task; // per_task: tokens
  double scale, beta;             // cos and sin times scale·(1 + beta·ln(1 + ⌊position/length⌋))
  int64_t length;                 // 0: no beta
} rope_table_args;

typedef struct {
  const void *x;
  const float *cos, *sin;
  void *y;
  int64_t tokens, heads, dim, half, per_task, bf16;
  int64_t x_token, x_head, y_token, y_head; // strides in elements
  const void *w;                            // [dim], weights of an RMSNorm before; NULL = no norm
  float *rstd;                              // [tokens, heads]
  int64_t rstd_token;                       // stride
  double eps;
  float centre, sign; // sign of the sine; -1 is the inverse rotation
} rope_args;
