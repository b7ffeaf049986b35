// Arguments of the kernel that measures the highest rate of multiply-adds.
#pragma once
#include <stdint.h>

typedef struct {
  int64_t bf16; // use products of BF16 pairs if the instruction set has them
  // A round is 12 independent fused multiply-adds of VW lanes, or multiplications and additions if
  // the instruction set has no fused form.
  int64_t rounds;
  float *sink; // [tasks]; keeps the compiler from removing the work
} peak_args;
