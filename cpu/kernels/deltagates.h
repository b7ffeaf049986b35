// Arguments of the gates of the gated delta rule, for each token and head: the logarithm of the
// decay g = -exp(alog)·softplus(a + bias), and beta = sigmoid(b). a and b have the compute type;
// alog [heads] and bias [heads] have the compute type or F32. *_row are strides of a row in
// elements.
#pragma once
#include <stdint.h>

typedef struct {
  const void *a, *b, *alog, *bias;
  float *g, *beta;
  int64_t rows, heads, per_task; // per_task: rows
  int64_t bf16, alog_bf16, bias_bf16;
  int64_t a_row, b_row, g_row, beta_row;
} delta_gates_args;

// delta_gates_grad_args: task s adds dalog and dbias of split s of the rows into partial +
// s*2*heads, which is [2][heads].
typedef struct {
  const void *a, *b, *alog, *bias;
  void *da, *db;
  const float *dg, *dbeta;
  float *partial;
  int64_t rows, heads, splits;
  int64_t bf16, alog_bf16, bias_bf16;
  int64_t a_row, b_row, dg_row, dbeta_row, da_row, db_row;
} delta_gates_grad_args;

typedef struct {
  const float *partial;
  float *dalog, *dbias;
  int64_t heads, splits;
} delta_gates_fold_args;
