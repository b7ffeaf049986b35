// Softmax cross-entropy with its gradient.
#pragma once
#include <stdint.h>

enum { CROSS_IGNORED = -100 };

typedef struct {
  const float *logits;
  const int32_t *targets;
  float *nll;
  void *dlogits;                                           // NULL: forward only
  int64_t rows, vocab, logits_row, dlogits_row, per, bf16; // per: rows of a task; bf16: of dlogits
  double scale;
} cross_args;
