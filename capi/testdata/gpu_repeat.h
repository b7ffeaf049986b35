// Attention with ULYSSES_DETERMINISTIC: it runs kernels of the library and is bitwise reproducible,
// or the plan is refused.
#pragma once
#include "gpu.h"

enum { TIMES = 4, REPEAT_HEADS = 4, REPEAT_KEYS = 2 };

// half returns a number in BF16, and whole_of a BF16 number as a float.
static inline uint16_t half(int which, int64_t i) {
  float f = number(which, i);
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)(bits >> 16);
}
static inline float whole_of(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// repeated runs attention TIMES times and checks that the results are bitwise equal. It returns
// out, dq, dk and dv as floats, with their numbers of elements.
static inline void repeated(ulysses_context *c, stream_t s, int32_t dtype, int64_t seq, int64_t dim,
                            float *result[4], int64_t counts[4]) {
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ulysses_batch_info info;
  ulysses_sizes size;
  ulysses_plan *plan;
  ulysses_batch *batch;
  ULYSSES_INIT(&d), ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  d.dtype = dtype, d.flags = ULYSSES_CAUSAL | ULYSSES_DETERMINISTIC, d.heads = REPEAT_HEADS,
  d.kv_heads = REPEAT_KEYS, d.head_dim = dim;
  bd.batch = 1, bd.seq = seq;
  OK(ulysses_attention_plan(c, &d, &plan));
  const char *row = strstr(ulysses_plan_json(plan), "\"attention\":{\"backward\":\"");
  CHECK(row && !strstr(row, "\"backward\":\"cudnn\"") &&
        strstr(row, dtype == ULYSSES_BF16 ? "\"backward\":\"mma\"" : "\"backward\":\"own\""));
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(ulysses_plan_sizes(plan, batch, &size));
  // inputs q, k, v, dout; outputs out, dq, dk, dv
  int64_t n = info.rows, bytes = dtype == ULYSSES_BF16 ? 2 : 4, q[4] = {1, n, REPEAT_HEADS, dim},
          k[4] = {1, n, REPEAT_KEYS, dim};
  static const int of_keys[8] = {0, 1, 1, 0, 0, 0, 1, 1};
  ulysses_tensor t[8];
  void *x[8];
  for (int i = 0; i < 8; i++) {
    int64_t *shape = of_keys[i] ? k : q, m = n * shape[2] * dim,
            first = info.lo[0] * shape[2] * dim;
    x[i] = device_allocate((uint64_t)(m * bytes));
    t[i] = ulysses_tensor_of(x[i], ULYSSES_CUDA, cuda.gpu, dtype, 4, shape, NULL);
    if (i >= 4) counts[i - 4] = m, result[i - 4] = allocate((uint64_t)m * 4);
    char *host = allocate((uint64_t)m * 4);
    for (int64_t j = 0; i < 4 && j < m; j++) {
      uint16_t h = half(70 + i, first + j);
      float f = whole_of(h);
      memcpy(host + j * bytes, bytes == 2 ? (void *)&h : (void *)&f, (size_t)bytes);
    }
    if (m) RUN(cuda.copy(x[i], host, (size_t)(m * bytes), TO_GPU, s));
    RUN(cuda.wait(s));
    free(host);
  }
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[4], a.stream = s;
  a.saved = device_allocate(size.saved), a.saved_bytes = size.saved;
  g.dout = &t[3], g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  char *first[4] = {0}, *now[4];
  for (int times = 0; times < TIMES; times++) {
    for (int i = 4; i < 8; i++)
      if (counts[i - 4]) RUN(cuda.set(x[i], 0xff, (size_t)(counts[i - 4] * bytes), s));
    OK(ulysses_attention_forward(plan, batch, &a));
    OK(ulysses_attention_backward(plan, batch, &a, &g));
    for (int i = 0; i < 4; i++) {
      now[i] = allocate((uint64_t)(counts[i] * bytes));
      if (counts[i]) RUN(cuda.copy(now[i], x[4 + i], (size_t)(counts[i] * bytes), TO_HOST, s));
      RUN(cuda.wait(s));
      CHECK(times == 0 || memcmp(now[i], first[i], (size_t)(counts[i] * bytes)) == 0);
      if (times) free(now[i]);
      else first[i] = now[i];
    }
  }
  for (int i = 0; i < 4; i++) {
    for (int64_t j = 0; j < counts[i]; j++) {
      uint16_t h;
      memcpy(bytes == 2 ? (void *)&h : (void *)&result[i][j], first[i] + j * bytes, (size_t)bytes);
      if (bytes == 2) result[i][j] = whole_of(h);
    }
    free(first[i]);
  }
  OK(ulysses_context_async_error(c));
  for (int i = 0; i < 8; i++) RUN(cuda.free(x[i]));
  RUN(cuda.free(a.saved));
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
}

// repeats: on a real GPU, there are enough tokens for thread blocks to run in different orders.
static inline void repeats(ulysses_context *c, stream_t s) {
  int64_t seq = cuda.emulated ? 70 : 4096, dim = cuda.emulated ? 16 : 128, n[2][4];
  float *r[2][4];
  repeated(c, s, ULYSSES_F32, seq, dim, r[0], n[0]);
  repeated(c, s, ULYSSES_BF16, seq, dim, r[1], n[1]);
  for (int i = 0; i < 4; i++) {
    if (n[0][i])
      close_to(r[1][i], r[0][i], n[0][i],
               3e-2); // BF16 has 8 bits, and results are rounded several times
    free(r[0][i]), free(r[1][i]);
  }
  // All ranks, also ranks without heads, refuse heads that no such kernel supports, and different
  // descriptions.
  ulysses_attention_desc d;
  ulysses_context_info info;
  ulysses_plan *plan = NULL;
  ULYSSES_INIT(&d), ULYSSES_INIT(&info);
  d.dtype = ULYSSES_F32, d.heads = 1, d.head_dim = 272, d.flags = ULYSSES_DETERMINISTIC;
  IS(ulysses_attention_plan(c, &d, &plan), ULYSSES_UNSUPPORTED);
  CHECK(!plan && strstr(ulysses_last_error(), "head_dim is 272") &&
        strstr(ulysses_last_error(), "256 features at most"));
  OK(ulysses_context_query(c, &info));
  if (info.size > 1) {
    d.head_dim = 16, d.flags = info.rank ? ULYSSES_DETERMINISTIC : 0;
    IS(ulysses_attention_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
    CHECK(!plan && strstr(ulysses_last_error(),
                          "ULYSSES_DETERMINISTIC is set on rank 1 and not set on rank 0"));
  }
}
