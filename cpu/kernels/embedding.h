// Rows of a table, and the sums of their gradients.
#pragma once
#include <stdint.h>

typedef struct {
  const void *table;
  const int32_t *ids;
  void *y;
  int64_t tokens, n, table_row, y_row, per, bf16; // per: tokens of a task
} embed_args;

typedef struct {
  const int32_t *ids;
  const void *dy;
  float *dtable;
  int64_t tokens, n, dy_row, table_row, per, bf16; // per: features of a task
} embed_grad_args;
