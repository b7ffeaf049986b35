// Hash tables whose keys are structs that are compared byte by byte, including padding. The caller
// clears a key with memset before it sets the fields.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <unordered_map>

template <class Key> struct EqualBytes {
  bool operator()(const Key &a, const Key &b) const { return memcmp(&a, &b, sizeof a) == 0; }
};

template <class Key> struct HashBytes {
  size_t operator()(const Key &k) const {
    uint64_t h = 14695981039346656037ull; // FNV-1a
    const unsigned char *p = reinterpret_cast<const unsigned char *>(&k);
    for (size_t i = 0; i < sizeof k; i++) h = (h ^ p[i]) * 1099511628211ull;
    return h;
  }
};

template <class Key, class Value> using BytesMap = std::unordered_map<Key, Value, HashBytes<Key>, EqualBytes<Key>>;
