// What stands between the plug-in and NVIDIA's libraries: dl.cpp looks for them at run time, and
// has functions of their names that forward, so that sources written against their headers link
// without them.
#pragma once

#include "libraries.h"

enum library { LIB_DRIVER, LIB_CUBLASLT, LIB_CUDNN, LIB_NVRTC, LIB_NCCL };

// library_open finds and opens one, once; false when it is not there, or lacks a function that is
// used.
bool library_open(library l);
// What a user is told: why it is not there, where it is, what to do.
std::string library_reason(library l);
std::string library_path(library l);
std::string library_remedy(library l);
// library_version is "13.1.0"; empty when the library is not there.
std::string library_version(library l);

// What gemm and sdpa keep with a device.
struct kept {
  virtual ~kept() = default;
};
struct device_libraries {
  kept *gemm = nullptr, *sdpa = nullptr;
};
// libraries_of makes it when it is first asked for.
device_libraries &libraries_of(uly_device *d);
