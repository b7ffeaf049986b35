// Rows of a table, and the sums of their gradients.
#pragma once
#include <stdint.h>

typedef struct {
  const float *table;
  const int32_t *ids;
  float *y;
  int64_t tokens, n, table_row, y_row, per; // per: tokens of a task
} embed_args;

typedef struct {
  const int32_t *ids;
  const float *dy;
  float *dtable;
  int64_t tokens, n, dy_row, table_row, per; // per: features of a task
} embed_grad_args;
