// Random bits as functions of counters. The file includes no CUDA; attention_index_test.cpp tests
// it on the host.
#pragma once

#include <math.h>

#include "index.h"

// mix64 is the function of SplitMix64 (Steele et al. 2014), a bijection.
ULY_BOTH uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// drop_of returns a probability of dropout times 2^24, kept_of the factor of what is kept.
inline uint32_t drop_of(double p) { return (uint32_t)nearbyint(p * (1 << 24)); }
inline float kept_of(double p) { return (float)(1 / (1 - p)); }

// Dropout, the function Keeps of testkit/ref: a query or token of a head has 64 random bits, a key
// or feature 32. keeps reports whether it keeps their weight; drop is of drop_of.
ULY_BOTH uint64_t head_bits(uint64_t seed, int64_t head) { return mix64(seed ^ (uint64_t)head * 0x9e3779b97f4a7c15); }
ULY_BOTH uint64_t query_bits(uint64_t head, int64_t query) { return mix64(head + (uint64_t)query); }
ULY_BOTH uint32_t key_bits(uint64_t seed, int64_t key) { return (uint32_t)mix64(~seed + (uint64_t)key); }
ULY_BOTH bool keeps(uint64_t query, uint32_t key, uint32_t drop) {
  uint32_t x = ((uint32_t)query ^ key) * ((uint32_t)(query >> 32) | 1);
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  x ^= x >> 16;
  return x >> 8 >= drop;
}
