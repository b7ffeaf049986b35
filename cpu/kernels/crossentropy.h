// Arguments of softmax cross-entropy: nll[r] = log Σ exp(logits[r]) - logits[r][targets[r]], and
// dlogits = scale·(softmax(logits) - onehot(targets)). Rows whose target is CROSS_IGNORED have nll
// 0 and gradient 0.
#pragma once
#include <stdint.h>

enum { CROSS_IGNORED = -100 };

typedef struct {
  const float *logits;
  const int32_t *targets;
  float *nll;
  void *dlogits; // NULL = not wanted
  // logits_row and dlogits_row are strides of a row; per_task: rows; bf16: type of dlogits
  int64_t rows, vocab, logits_row, dlogits_row, per_task, bf16;
  double scale, softcap; // softcap c > 0: logits are first replaced by c·tanh(x/c)
} cross_args;
