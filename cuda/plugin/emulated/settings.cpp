#include "settings.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <wchar.h>

#include <numeric>

namespace uly_emulated {

int64_t setting(const char *name, int64_t otherwise) {
  const char *v = getenv(name);
  return v && *v ? strtoll(v, nullptr, 10) : otherwise;
}

uint64_t random64() { // splitmix64
  static uint64_t state = (uint64_t)setting("ULYSSES_EMULATED_SEED", 1) * 0x9e3779b97f4a7c15u;
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

Steps::Steps(uint64_t n) : n(n) {
  if (n < 2) return;
  start = random_below(n);
  do step = 1 + random_below(n - 1);
  while (std::gcd(step, n) != 1);
}

void poison(void *p, size_t n) {
  unsigned char *at = static_cast<unsigned char *>(p), *const end = at + n;
  while (at < end && ((uintptr_t)at & 3) != 0) *at = poison_at(at), at++;
  wmemset(reinterpret_cast<wchar_t *>(at), 0x7fffffff, (size_t)(end - at) / sizeof(wchar_t));
  for (at = end - (uintptr_t)(end - at) % 4; at < end; at++) *at = poison_at(at);
}

std::string format(const char *f, ...) {
  char text[1024];
  va_list args;
  va_start(args, f);
  vsnprintf(text, sizeof text, f, args);
  va_end(args);
  return text;
}

} // namespace uly_emulated
