// Which GPUs there are, and in what words it is said that there are none.
#pragma once

#include <string.h>

#include <string>

#include "plugin.h"

#ifdef ULY_EMULATED
enum : bool { emulated = true };
#else
enum : bool { emulated = false };
#endif

// count_gpus returns how many GPUs this process sees, or 0 and why.
int count_gpus(std::string *why);

// probe is the row of the table.
int32_t probe(uly_probe *out);

// put writes s into out, as much of it as there is room for.
inline void put(char *out, size_t bytes, const std::string &s) {
  size_t n = s.size() < bytes ? s.size() : bytes - 1;
  memcpy(out, s.data(), n);
  out[n] = 0;
}
