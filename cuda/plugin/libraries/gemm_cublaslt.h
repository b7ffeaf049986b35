// Matrix products by cuBLASLt, for arguments that gemm_refusal (gemm.h) has accepted. A bias must
// have the type of C.
#pragma once

#include "plugin.h"

bool gemm_cublaslt_fits(uly_device *d, const uly_gemm &g);
int32_t gemm_cublaslt(uly_device *d, uly_stream *s, const uly_gemm &g);
