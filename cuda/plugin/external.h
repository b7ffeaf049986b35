// Functions of uly_cuda_api (kernels.h) for host programs that use CUDA themselves.
#pragma once

#include "plugin.h"

int32_t stream_wrap(uly_device *, void *external, uly_stream **s);
int32_t memory_kind(uly_device *, const void *p, int32_t *kind, int32_t *ordinal);
