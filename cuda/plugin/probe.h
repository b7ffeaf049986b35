// The GPUs and libraries that this process can use, for probe and info.
#pragma once

#include <string.h>

#include <string>

#include "plugin.h"

// count_gpus returns the number of GPUs that this process sees. If it is 0, *why is the reason.
int count_gpus(std::string *why);

// libraries_text returns the versions for uly_info.kernels, such as "cuBLASLt 13.1.0, cuDNN
// 9.19.0".
std::string libraries_text();

// probe is a function of uly_cuda_api (kernels.h).
int32_t probe(uly_probe *out);

// put copies s into out and truncates it to `bytes`, with the final 0.
inline void put(char *out, size_t bytes, const std::string &s) {
  size_t n = s.size() < bytes ? s.size() : bytes - 1;
  memcpy(out, s.data(), n);
  out[n] = 0;
}
