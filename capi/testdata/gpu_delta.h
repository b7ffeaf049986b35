// The gated delta rule on a GPU: by heads and by states, with and without states of documents, in
// F32 and BF16, and its whole layer in F32. The results of one rank are close to the CPU's, the
// results of several ranks agree with one rank's, and a repeated call is bitwise equal.
#pragma once
#include "delta_layer.h"
#include "gpu.h"

// Relative to the largest value, in BF16: it has 8 bits, and sums are rounded more than once.
#define COARSE 2e-2

static inline void *delta_allocate(uint64_t bytes) { return device_allocate(bytes); }
static inline void delta_release(void *p) { RUN(cuda.free(p)); }
static inline void *delta_to_gpu(const void *host, uint64_t bytes, void *stream) {
  void *p = device_allocate(bytes);
  if (bytes) RUN(cuda.copy(p, host, bytes, TO_GPU, stream));
  RUN(cuda.wait(stream)); // the caller may free the host memory
  return p;
}
static inline void delta_to_host(void *host, const void *gpu, uint64_t bytes, void *stream) {
  if (bytes) RUN(cuda.copy(host, gpu, bytes, TO_HOST, stream));
  RUN(cuda.wait(stream));
}
static inline void delta_overwrite(void *gpu, uint64_t bytes, void *stream) {
  if (bytes) RUN(cuda.set(gpu, 0xff, bytes, stream));
}
static inline void delta_called(void *stream, const void *out) { check_pending(stream, out); }

// delta_layers tests whole layers on the context c on the GPU; alone has one rank on this GPU.
static inline void delta_layers(ulysses_context *cpu, ulysses_context *c, ulysses_context *alone,
                                const gpu_memory *m) {
  for (int normed = 0; normed < 2; normed++) {
    how h = {.strategy = ULYSSES_GDN_HEADS};
    layer_outcome want = whole_layer(cpu, &h, normed);
    h.gpu = m;
    layer_outcome one = whole_layer(alone, &h, normed);
    layers_agree("a layer on a GPU, against the CPU", &one, &want, normed, 1, TWO_DEVICES);
    for (; h.strategy <= ULYSSES_GDN_STATE; h.strategy++) {
      layer_outcome part = whole_layer(c, &h, normed);
      layers_agree("a layer on GPUs", &part, &one, normed, 0,
                   h.strategy == ULYSSES_GDN_HEADS ? 0 : TWO_DEVICES);
      free_layer(&part);
    }
    free_layer(&one), free_layer(&want);
  }
}

// deltas tests the context c on the GPU; alone is a context of one rank on it.
static inline void deltas(ulysses_context *c, ulysses_context *alone, stream_t s, int waits) {
  gpu_memory m = {cuda.gpu,        s,   delta_allocate, delta_release, delta_to_gpu, delta_to_host,
                  delta_overwrite, NULL},
             checked_memory = m;
  // a real GPU may have finished by then
  if (!waits && cuda.emulated) checked_memory.called = delta_called;
  ulysses_context *cpu = context_on(ULYSSES_CPU, 0);
  for (int32_t bf16 = 0; bf16 < 2; bf16++)
    for (int states = 0; states < 2; states++) {
      how h = {
          .strategy = ULYSSES_GDN_HEADS, .dtype = ULYSSES_F32, .states = states, .coarse = bf16};
      outcome want = rule(cpu, &h);
      recurrence(&want, states);
      h.dtype = bf16 ? ULYSSES_BF16 : ULYSSES_F32, h.gpu = &m;
      outcome one = rule(alone, &h), again = rule(alone, &h);
      agree("one rank on a GPU, against the CPU", &one, &want, states, bf16 ? COARSE : TWO_DEVICES);
      agree("the same call again", &again, &one, states, 0);
      free_outcome(&again);
      h.gpu = &checked_memory;
      for (h.strategy = ULYSSES_GDN_HEADS; h.strategy <= ULYSSES_GDN_STATE; h.strategy++) {
        outcome part = rule(c, &h);
        agree(h.strategy == ULYSSES_GDN_HEADS ? "heads on a GPU" : "states on a GPU", &part, &one,
              states,
              h.strategy == ULYSSES_GDN_HEADS ? 0
              : bf16                          ? COARSE
                                              : TWO_DEVICES);
        free_outcome(&part);
      }
      free_outcome(&one), free_outcome(&want);
    }
  delta_layers(cpu, c, alone, &m);
  ulysses_context_destroy(cpu);
}
