// Matrix products by cuBLASLt, for arguments that gemm.cu has checked; a bias is of C's type.
#pragma once

#include "plugin.h"

bool gemm_cublaslt_fits(uly_device *d, const uly_gemm &g);
int32_t gemm_cublaslt(uly_device *d, uly_stream *s, const uly_gemm &g);
