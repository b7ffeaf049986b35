// Arguments of the optimizer steps on n elements. AdamW is Loshchilov & Hutter 2019
// (arXiv:1711.05101): with g' = grad·g,
//
//	m = β₁·m + (1-β₁)·g'    v = β₂·v + (1-β₂)·g'²    w = keep·w - size·m / (√v/root + eps)
//
// SGD has no momentum: w = keep·w - rate·g.
#pragma once
#include <stdint.h>

typedef struct {
  float *w, *m, *v;
  const float *g;
  int64_t n, per_task;                          // elements in all, and of a task
  float grad, keep, beta1, beta2, rest1, rest2; // GradScale, 1 - lr·wd, β₁, β₂, 1 - β₁, 1 - β₂
  float size, root, eps;                        // lr/(1-β₁ᵗ), sqrt(1-β₂ᵗ), ε
} adamw_args;

typedef struct {
  float *w;
  const float *g;
  int64_t n, per_task;
  float keep, rate; // 1 - lr·wd, lr·GradScale
} sgd_args;
