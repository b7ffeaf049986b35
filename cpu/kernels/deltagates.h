// The gates of the gated delta rule: decays and betas of a token's heads. a and b are of the
// compute type, alog and bias each of it or of F32.
#pragma once
#include <stdint.h>

typedef struct {
  const void *a, *b, *alog, *bias;
  float *g, *beta;
  int64_t rows, heads, per; // per: rows of a task
  int64_t bf16, alog_bf16, bias_bf16;
  int64_t a_row, b_row, g_row, beta_row; // strides
} delta_gates_args;

// delta_gates_grad_args: part p of the rows sums into partial + p*2*heads: dalog, dbias.
typedef struct {
  const void *a, *b, *alog, *bias;
  void *da, *db;
  const float *dg, *dbeta;
  float *partial;
  int64_t rows, heads, parts;
  int64_t bf16, alog_bf16, bias_bf16;
  int64_t a_row, b_row, dg_row, dbeta_row, da_row, db_row;
} delta_gates_grad_args;

typedef struct {
  const float *partial;
  float *dalog, *dbias;
  int64_t heads, parts;
} delta_gates_fold_args;
