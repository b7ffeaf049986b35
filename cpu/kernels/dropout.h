// Arguments of dropout: y = x / (1 - p), or 0 for the elements that are not kept.
#pragma once

typedef struct {
  const void *x;
  const int64_t *numbers; // of the tokens
  void *y;
  int64_t tokens, n, x_row, y_row, per_task, bf16, add;
  uint64_t seed;
  int64_t drop; // p times 2^24
  float kept;   // 1 / (1 - p)
} dropout_args;
