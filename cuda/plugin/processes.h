// Sharing memory and events with other processes, and memory with other GPUs of this process
// (processes.cu).
#pragma once

#include "plugin.h"

// Functions of uly_cuda_api (kernels.h).
int32_t memory_handle(uly_device *, const void *p, char handle[ULY_HANDLE], int64_t *offset, uint64_t *generation);
int32_t memory_open(uly_device *, const char handle[ULY_HANDLE], void **out);
int32_t memory_close(uly_device *, void *p);
int32_t event_handle(uly_device *, uly_event *, char handle[ULY_HANDLE]);
int32_t event_open(uly_device *, const char handle[ULY_HANDLE], uly_event **out);
int32_t copy_bytes(uly_device *, uly_stream *, void *dst, const void *src, int64_t bytes);
int32_t peer_access(uly_device *, int32_t ordinal, int32_t *can);
