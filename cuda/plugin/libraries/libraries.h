// What the plug-in uses of NVIDIA's libraries, all opened at run time: cuBLASLt (gemm), cuDNN with
// NVRTC (sdpa), NCCL. A library that is missing fails where it is needed, with its name and remedy;
// in the emulated build none is there.
#pragma once

#include "plugin.h"

struct AttentionArgs;

// probe_libraries fills out->library: the driver, cuBLASLt, cuDNN, NVRTC, NCCL. It never fails.
void probe_libraries(uly_probe *out);
// What the device says of its libraries in uly_info.kernels: "cuBLASLt 13.1.0, cuDNN 9.19.0".
std::string libraries_text(uly_device *d);
// Gives back what gemm and sdpa keep in d->libraries.
void libraries_close(uly_device *d);

// cuDNN's attention. fits answers without touching the GPU; workspace is in bytes, beyond the
// tables of documents.
bool sdpa_fits(uly_device *d, const AttentionArgs &a);
int64_t sdpa_workspace(uly_device *d, const AttentionArgs &a);
int32_t sdpa_run(uly_device *d, uly_stream *s, const AttentionArgs &a);

// The rows of kernels.h.
int32_t nccl_id(uly_device *, char id[ULY_NCCL_ID]);
int32_t nccl_init(uly_device *, const char id[ULY_NCCL_ID], int32_t ranks, int32_t rank, uly_nccl **out);
int32_t nccl_close(uly_device *, uly_nccl *);
int32_t nccl_abort(uly_device *, uly_nccl *);
int32_t nccl_error(uly_device *, uly_nccl *, char *text, int64_t text_bytes);
int32_t nccl_all_to_all(uly_device *, uly_nccl *, uly_stream *, void *dst, const int64_t *recv_at,
                        const int64_t *recv_bytes, const void *src, const int64_t *send_at, const int64_t *send_bytes);
int32_t nccl_all_reduce(uly_device *, uly_nccl *, uly_stream *, void *x, int64_t n, int32_t dtype, int32_t how);
int32_t nccl_broadcast(uly_device *, uly_nccl *, uly_stream *, void *x, int64_t bytes, int32_t root);
int32_t nccl_send_recv(uly_device *, uly_nccl *, uly_stream *, void *recv, int64_t recv_bytes, int32_t from,
                       const void *send, int64_t send_bytes, int32_t to);
