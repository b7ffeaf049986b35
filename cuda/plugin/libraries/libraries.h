// NVIDIA's libraries, which the plug-in opens at run time and links none of: the driver, cuBLASLt (GEMM),
// cuDNN with NVRTC (attention), NCCL (collectives). dl.cpp finds and opens them. A call to a missing
// library fails with the library's name and a fix. emulated/libraries.cpp defines the functions of this
// header for the emulated build, which has no libraries.
#pragma once

#include "plugin.h"

struct AttentionArgs;

enum library { LIB_DRIVER, LIB_CUBLASLT, LIB_CUDNN, LIB_NVRTC, LIB_NCCL };

// library_open finds and opens a library once. It returns false where the library is missing or lacks a
// function that the plug-in needs.
bool library_open(library l);
// For messages: why the library is missing, its path, and how to install it.
std::string library_reason(library l);
std::string library_path(library l);
std::string library_remedy(library l);
// library_version returns "13.1.0"; "" where the library is missing.
std::string library_version(library l);

// kept is what gemm_cublaslt.cpp and sdpa.cpp keep with a device: handles and plans.
struct kept {
  virtual ~kept() = default;
};
struct device_libraries {
  kept *gemm = nullptr, *sdpa = nullptr;
};
// libraries_of returns the device's libraries; the first call makes them.
device_libraries &libraries_of(uly_device *d);
// libraries_close frees d->libraries.
void libraries_close(uly_device *d);

// Attention by cuDNN (sdpa.cpp). sdpa_fits launches nothing on the GPU; sdpa_workspace returns bytes,
// without the tables of documents.
bool sdpa_fits(uly_device *d, const AttentionArgs &a);
int64_t sdpa_workspace(uly_device *d, const AttentionArgs &a);

// thread_context returns the CUDA context of the calling thread, NULL for none; thread_context_set
// makes `was` the thread's context again.
void *thread_context();
void thread_context_set(void *was);

// memory_range finds the CUDA allocation that p lies in. It returns false where p is in none.
bool memory_range(const void *p, char **base, int64_t *bytes);

// NCCL: functions of uly_cuda_api (kernels.h).
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
