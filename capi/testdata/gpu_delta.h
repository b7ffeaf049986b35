// The gated delta rule on a GPU: by heads and by states, with and without states of documents, in
// F32 and BF16; one rank's results are near the CPU's, those of several are one's, and the same
// call has the same bits.
#pragma once
#include "delta.h"
#include "gpu.h"

#define COARSE 2e-2 // of the largest value, in BF16: 8 bits, and sums of them round more than once

static inline void *delta_room(uint64_t bytes) { return device_room(bytes); }
static inline void delta_give(void *p) { RUN(cuda.free(p)); }
static inline void *delta_lift(const void *host, uint64_t bytes, void *stream) {
  void *p = device_room(bytes);
  if (bytes) RUN(cuda.copy(p, host, bytes, TO_GPU, stream));
  RUN(cuda.wait(stream)); // the host's memory may go
  return p;
}
static inline void delta_fetch(void *host, const void *gpu, uint64_t bytes, void *stream) {
  if (bytes) RUN(cuda.copy(host, gpu, bytes, TO_HOST, stream));
  RUN(cuda.wait(stream));
}
static inline void delta_wipe(void *gpu, uint64_t bytes, void *stream) {
  if (bytes) RUN(cuda.set(gpu, 0xff, bytes, stream));
}
static inline void delta_called(void *stream, const void *out) { is_late(stream, out); }

// deltas: c is a context of the GPU, alone one of this rank alone there.
static inline void deltas(ulysses_context *c, ulysses_context *alone, stream_t s, int waits) {
  gpu_memory m = {cuda.gpu, s, delta_room, delta_give, delta_lift, delta_fetch, delta_wipe, NULL},
             late_memory = m;
  // a GPU is soon done with so little
  if (!waits && cuda.emulated) late_memory.called = delta_called;
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
      end(&again);
      h.gpu = &late_memory;
      for (h.strategy = ULYSSES_GDN_HEADS; h.strategy <= ULYSSES_GDN_STATE; h.strategy++) {
        outcome part = rule(c, &h);
        agree(h.strategy == ULYSSES_GDN_HEADS ? "heads on a GPU" : "states on a GPU", &part, &one,
              states,
              h.strategy == ULYSSES_GDN_HEADS ? 0
              : bf16                          ? COARSE
                                              : TWO_DEVICES);
        end(&part);
      }
      end(&one), end(&want);
    }
  ulysses_context_destroy(cpu);
}
