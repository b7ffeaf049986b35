// What a guest in somebody's program needs beyond its own device: see guest.cu.
#pragma once

#include "plugin.h"

// The rows of kernels.h.
int32_t stream_wrap(uly_device *, void *theirs, uly_stream **s);
int32_t place_of(uly_device *, const void *p, int32_t *place, int32_t *ordinal);

// thread_context is what the calling thread computes on, for thread_context_set.
void *thread_context();
void thread_context_set(void *was);

// memory_range finds the allocation that device memory lies in; false for what is no allocation.
bool memory_range(const void *p, char **base, int64_t *bytes);
