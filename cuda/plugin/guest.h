// What the plug-in does for a program that uses CUDA itself: functions of uly_cuda_api (kernels.h).
#pragma once

#include "plugin.h"

int32_t stream_wrap(uly_device *, void *theirs, uly_stream **s);
int32_t place_of(uly_device *, const void *p, int32_t *place, int32_t *ordinal);
