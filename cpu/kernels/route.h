// Arguments of the operations of mixtures of experts: the choice of experts, and the moves of rows
// between tokens and experts. k is the number of experts of a token. Rows [tokens, k] has the row
// of each choice among all choices, which are sorted by expert.
#pragma once
#include <stdint.h>

typedef struct {
  float *logits; // [tokens, experts], replaced by their softmax or sigmoid
  int32_t *chosen, *rows, *offsets;
  float *weights;          // [tokens·k], by row
  const float *bias;       // [experts], added to the probability for the choice; NULL = none
  const int32_t *sequence; // of each token; NULL = nothing is counted
  double *counts, *sums;   // [sequences, experts]
  int64_t tokens, experts, k, per_task, logits_row, normalize, sums_per_task;
  int64_t sigmoid, groups, kept_groups;
  float weight_scale;
} route_args;

typedef struct {
  const float *probs;
  const int32_t *chosen, *rows;
  const float *weights, *dweights;
  const int32_t *sequence;
  const double *counts;
  const float *scale; // of each sequence
  void *dlogits;
  int64_t tokens, experts, k, per_task, probs_row, dlogits_row, normalize, sigmoid, bf16;
  double weight_scale;
} route_grad_args;

typedef struct {
  const void *x;
  const int32_t *rows;
  const float *weights; // by row; NULL = 1. Not used by spread_rows, like own
  void *y;
  const void *own; // by token; NULL = 0
  const float *own_weights;
  int64_t tokens, k, n, x_row, y_row, own_row, per_task, bf16;
} rows_args;
