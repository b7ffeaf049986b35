// Which GPUs and libraries this process has, for probe and info.
#pragma once

#include <string.h>

#include <string>

#include "plugin.h"

// count_gpus returns how many GPUs this process sees, or 0 and why.
int count_gpus(std::string *why);

// libraries_text returns the libraries' versions for uly_info.kernels: "cuBLASLt 13.1.0, cuDNN 9.19.0".
std::string libraries_text();

// probe is the function of uly_cuda_api (kernels.h).
int32_t probe(uly_probe *out);

// put writes s into out, as much of it as there is room for.
inline void put(char *out, size_t bytes, const std::string &s) {
  size_t n = s.size() < bytes ? s.size() : bytes - 1;
  memcpy(out, s.data(), n);
  out[n] = 0;
}
