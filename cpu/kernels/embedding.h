// Arguments of the embedding: y[t] = table[ids[t]], and dtable[ids[t]] += dy[t]. n is the number of
// features; *_row are strides of a row in elements.
#pragma once
#include <stdint.h>

typedef struct {
  const void *table;
  const int32_t *ids;
  void *y;
  int64_t tokens, n, table_row, y_row, per_task, bf16; // per_task: tokens
} embed_args;

typedef struct {
  const int32_t *ids;
  const void *dy;
  float *dtable;
  int64_t tokens, n, dy_row, table_row, per_task, bf16; // per_task: features
} embed_grad_args;
