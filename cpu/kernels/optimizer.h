// Steps of the optimizers, element by element.
#pragma once
#include <stdint.h>

typedef struct {
  float *w, *m, *v;
  const float *g;
  int64_t n, piece;
  float grad, keep, beta1, beta2, rest1, rest2; // GradScale, 1 - lr·wd, β, 1 - β
  float size, root, eps;                        // lr/(1-β₁ᵗ), sqrt(1-β₂ᵗ)
} adamw_args;

typedef struct {
  float *w;
  const float *g;
  int64_t n, piece;
  float keep, rate; // 1 - lr·wd, lr·GradScale
} sgd_args;
