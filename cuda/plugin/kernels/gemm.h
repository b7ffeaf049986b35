// Declarations that the GEMM kernels share.
#pragma once

#include <string>

#include "libraries/gemm_layout.h"
#include "plugin.h"

inline gemm_view gemm_view_of(const uly_tensor &t) { return {t.shape[0], t.shape[1], t.stride[0], t.stride[1]}; }

// gemm_refusal returns why the arguments are invalid, "" if they are valid.
std::string gemm_refusal(const uly_gemm &g);
