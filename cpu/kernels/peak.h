// Arguments of the peak kernel.
#pragma once
#include <stdint.h>

typedef struct {
  int64_t bf16; // products of BF16, where the set has them
  // each is 12 independent fused multiply-adds of VW lanes (multiply and add where the set has no
  // fused form)
  int64_t rounds;
  float *sink; // [tasks] keeps the work from being dropped
} peak_args;
