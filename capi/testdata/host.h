// Helpers of the test programs. A check that fails prints its place and ends the program, without
// the handlers of exit: other ranks may be threads that still run.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "ulysses.h"

#define CHECK(x)                                                                        \
  do {                                                                                  \
    if (!(x)) {                                                                         \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, ulysses_last_error()); \
      fflush(NULL), _exit(9);                                                           \
    }                                                                                   \
  } while (0)
// OK checks that a call succeeds, IS that it returns a status and sets a message.
#define OK(x) CHECK((x) == ULYSSES_OK)
#define IS(x, status) CHECK((x) == (status) && ulysses_last_error()[0])

enum { B = 2, S = 13, H = 4, D = 8 };

// number returns element i of tensor `which`, a number in [-0.5, 0.5). It is the same on all ranks.
static inline float number(int which, int64_t i) {
  uint32_t x = (uint32_t)(i * 2654435761u + (uint32_t)which * 40503u);
  x ^= x >> 13, x *= 0x5bd1e995u, x ^= x >> 15;
  return (float)(x & 0xffff) / 65536.0f - 0.5f;
}

// allocate returns memory that is aligned as the CPU needs it and filled with 0x7f.
static inline void *allocate(uint64_t bytes) {
  void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
  CHECK(p);
  memset(p, 0x7f, (bytes + 127) / 64 * 64);
  return p;
}

// floats returns a row-major F32 tensor [4 axes] in host memory.
static inline ulysses_tensor floats(float *data, int64_t *shape) {
  return ulysses_tensor_of(data, ULYSSES_CPU, 0, ULYSSES_F32, 4, shape, NULL);
}

// Results of attention for this rank's rows [lo, hi): [B, hi - lo, H, D].
typedef struct {
  int64_t lo, hi;
  float *out, *dq, *dk, *dv;
} results;

// fill sets rows [lo, hi) of tensor `which` [B, S, H, D].
static inline void fill(int which, float *x, int64_t lo, int64_t hi) {
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < (hi - lo) * H * D; i++)
      x[b * (hi - lo) * H * D + i] = number(which, (b * S + lo) * H * D + i);
}

// attention runs causal attention forward and backward, `times` times with a workspace and once
// without, and returns the last results.
static inline results attention(ulysses_context *c, int times) {
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.flags = ULYSSES_CAUSAL, d.heads = H, d.head_dim = D;
  bd.batch = B, bd.seq = S;
  ulysses_plan *plan;
  ulysses_batch *batch;
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  ulysses_batch_info info;
  ULYSSES_INIT(&info);
  OK(ulysses_batch_query(batch, &info));
  ulysses_sizes size;
  ULYSSES_INIT(&size);
  OK(ulysses_plan_sizes(plan, batch, &size));
  results r = {info.lo[0], info.hi[0], 0, 0, 0, 0};
  int64_t n = info.rows, shape[4] = {B, n, H, D};
  float *x[8];
  ulysses_tensor t[8];
  for (int i = 0; i < 8; i++) {
    x[i] = allocate((uint64_t)(B * n * H * D) * 4);
    t[i] = floats(x[i], shape);
    if (i < 4) fill(i, x[i], r.lo, r.hi);
  }
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a);
  ULYSSES_INIT(&g);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[4];
  a.saved = allocate(size.saved), a.saved_bytes = size.saved,
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace;
  g.dout = &t[3], g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  for (int i = 0; i < times; i++) {
    OK(ulysses_attention_forward(plan, batch, &a));
    OK(ulysses_attention_backward(plan, batch, &a, &g));
  }
  free(a.workspace);
  a.workspace = NULL, a.workspace_bytes = 0; // the context's own workspace
  OK(ulysses_attention_forward(plan, batch, &a));
  OK(ulysses_attention_backward(plan, batch, &a, &g));
  free(a.saved);
  for (int i = 0; i < 4; i++) free(x[i]);
  r.out = x[4], r.dq = x[5], r.dk = x[6], r.dv = x[7];
  ulysses_plan_destroy(plan);
  ulysses_batch_destroy(batch);
  return r;
}

static inline void free_results(results r) { free(r.out), free(r.dq), free(r.dk), free(r.dv); }

// same checks that a rank's results are bitwise equal to its rows of the whole results.
static inline void same(results part, results whole) {
  const float *p[4] = {part.out, part.dq, part.dk, part.dv},
              *w[4] = {whole.out, whole.dq, whole.dk, whole.dv};
  int64_t n = part.hi - part.lo;
  for (int i = 0; i < 4; i++)
    for (int b = 0; b < B; b++)
      CHECK(memcmp(p[i] + b * n * H * D, w[i] + (b * S + part.lo) * H * D,
                   (size_t)(n * H * D) * 4) == 0);
}
