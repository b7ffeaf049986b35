// Settings from environment variables, random numbers with a fixed seed, and formatted text.
#pragma once

#include <stdint.h>

#include <string>

namespace uly_emulated {

// setting returns the number in an environment variable, `otherwise` if it is not set.
int64_t setting(const char *name, int64_t otherwise);

// random64 returns the next number of the sequence that ULYSSES_EMULATED_SEED selects. The caller
// must hold the lock.
uint64_t random64();
// random_below returns a random number in [0, n).
inline uint64_t random_below(uint64_t n) { return (uint64_t)((unsigned __int128)random64() * n >> 64); }

// Steps is a simple permutation of 0 … n-1: start + i·step mod n, where step and n have no common
// factor.
struct Steps {
  uint64_t n = 1, start = 0, step = 1;
  Steps() = default;
  explicit Steps(uint64_t n);
  uint64_t operator()(uint64_t i) const {
    // a short division, because every thread of a kernel takes some
    if (n >> 16 == 0 && i < n) return (uint32_t)(start + i * step) % (uint32_t)n;
    return n >> 32 ? (uint64_t)((start + (unsigned __int128)i * step) % n) : (start + i * step) % n;
  }
};

// poison_at is the value of the byte at p in memory that nothing has written: words of 0x7fffffff,
// which are NaN in F16, BF16, F32 and F64, and far outside of any array as an index. poison fills n
// bytes with it.
inline unsigned char poison_at(const void *p) { return ((uintptr_t)p & 3) == 3 ? 0x7f : 0xff; }
void poison(void *p, size_t n);

std::string format(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace uly_emulated
