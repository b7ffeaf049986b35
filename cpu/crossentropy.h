// Softmax cross-entropy with its gradient.
#pragma once
#include <stdint.h>

enum { CROSS_IGNORED = -100 };

typedef struct {
  const float *logits;
  const int32_t *targets;
  float *nll, *dlogits; // dlogits NULL: forward only
  int64_t rows, vocab, logits_row, dlogits_row, per; // per: rows of a task
  double scale;
} cross_args;
