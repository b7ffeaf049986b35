// NVIDIA's libraries, which the plug-in opens at run time and does not link: the driver, cuBLASLt
// (GEMM), cuDNN with NVRTC (attention), NCCL (collectives). dl.cpp finds and opens them. A call to
// a missing library fails, and the message names the library and a fix. emulated/libraries.cpp
// defines the functions of this header for the emulated build, which uses no libraries.
#pragma once

#include "plugin.h"

struct AttentionArgs;

enum library { LIB_DRIVER, LIB_CUBLASLT, LIB_CUDNN, LIB_NVRTC, LIB_NCCL };

// library_open finds and opens a library; later calls return the same result. It returns false if
// the library is missing or lacks a function that the plug-in needs.
bool library_open(library l);
// For messages: why the library is missing, the path of its file, and how to install it.
std::string library_reason(library l);
std::string library_path(library l);
std::string library_fix(library l);
// library_version returns a version such as "13.1.0", or "" if the library is missing.
std::string library_version(library l);

// library_state is what gemm_cublaslt.cpp or sdpa.cpp keeps for each device: a handle and plans.
struct library_state {
  virtual ~library_state() = default;
};
struct device_libraries {
  library_state *gemm = nullptr, *sdpa = nullptr;
};
// libraries_of returns the device's libraries. The first call allocates them.
device_libraries &libraries_of(uly_device *d);
// libraries_close frees d->libraries.
void libraries_close(uly_device *d);

// Attention by cuDNN (sdpa.cpp). sdpa_fits launches nothing on the GPU. sdpa_workspace returns
// bytes, without the tables of documents.
bool sdpa_fits(uly_device *d, const AttentionArgs &a);
int64_t sdpa_workspace(uly_device *d, const AttentionArgs &a);

// thread_context returns the CUDA context of the calling thread, NULL if there is none.
// thread_context_set makes `was` current again.
void *thread_context();
void thread_context_set(void *was);

// memory_range finds the CUDA allocation that contains p. It returns false if there is none.
bool memory_range(const void *p, char **base, int64_t *bytes);
// memory_generation finds the number of this allocation, which CUDA gives to no other allocation of
// the process. It returns false if there is none.
bool memory_generation(const void *p, uint64_t *generation);

// NCCL: functions of uly_cuda_api (kernels.h).
int32_t nccl_ordered(uly_device *, int32_t *ordered);
int32_t nccl_id(uly_device *, char id[ULY_NCCL_ID]);
int32_t nccl_init(uly_device *, const char id[ULY_NCCL_ID], int32_t ranks, int32_t rank, uly_nccl **out);
int32_t nccl_close(uly_device *, uly_nccl *);
int32_t nccl_abort(uly_device *, uly_nccl *);
int32_t nccl_error(uly_device *, uly_nccl *, char *text, int64_t text_bytes);
int32_t nccl_all_to_all(uly_device *, uly_nccl *, uly_stream *, void *dst, const int64_t *recv_at,
                        const int64_t *recv_bytes, const void *src, const int64_t *send_at, const int64_t *send_bytes);
int32_t nccl_all_gather(uly_device *, uly_nccl *, uly_stream *, void *dst, const void *src, int64_t bytes);
int32_t nccl_all_reduce(uly_device *, uly_nccl *, uly_stream *, void *x, int64_t n, int32_t dtype);
int32_t nccl_reduce_scatter(uly_device *, uly_nccl *, uly_stream *, void *dst, const void *src, int64_t n,
                            int32_t dtype);
int32_t nccl_broadcast(uly_device *, uly_nccl *, uly_stream *, void *x, int64_t bytes, int32_t root);
int32_t nccl_send_recv(uly_device *, uly_nccl *, uly_stream *, void *recv, int64_t recv_bytes, int32_t from,
                       const void *send, int64_t send_bytes, int32_t to);
