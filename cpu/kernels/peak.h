// Arguments of the peak kernel.
#pragma once
#include <stdint.h>

typedef struct {
  int64_t bf16;   // products of BF16, where the set has them
  int64_t rounds; // each is 12 independent fused multiply-adds of VW lanes (multiply and add where the set has no fused form)
  float *sink;    // [tasks] keeps the work from being dropped
} peak_args;
