// The emulated runtime under the C names of libcudart, for tests of host programs that call it. The
// programs run on a GPU without changes.
#include "runtime.h"

#define SHOWN(name) __asm__(name) __attribute__((visibility("default"), used))

cudaError_t host_get_device(int *ordinal) SHOWN("cudaGetDevice");
cudaError_t host_get_device(int *ordinal) { return cudaGetDevice(ordinal); }
cudaError_t host_set_device(int ordinal) SHOWN("cudaSetDevice");
cudaError_t host_set_device(int ordinal) { return cudaSetDevice(ordinal); }
cudaError_t host_malloc(void **p, size_t bytes) SHOWN("cudaMalloc");
cudaError_t host_malloc(void **p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t host_free(void *p) SHOWN("cudaFree");
cudaError_t host_free(void *p) { return cudaFree(p); }
cudaError_t host_malloc_host(void **p, size_t bytes) SHOWN("cudaMallocHost");
cudaError_t host_malloc_host(void **p, size_t bytes) { return cudaMallocHost(p, bytes); }
cudaError_t host_memcpy_async(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s)
    SHOWN("cudaMemcpyAsync");
cudaError_t host_memcpy_async(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  return cudaMemcpyAsync(dst, src, bytes, kind, s);
}
cudaError_t host_memset_async(void *p, int value, size_t bytes, cudaStream_t s) SHOWN("cudaMemsetAsync");
cudaError_t host_memset_async(void *p, int value, size_t bytes, cudaStream_t s) {
  return cudaMemsetAsync(p, value, bytes, s);
}
cudaError_t host_stream_create(cudaStream_t *s, unsigned flags) SHOWN("cudaStreamCreateWithFlags");
cudaError_t host_stream_create(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithFlags(s, flags); }
cudaError_t host_stream_destroy(cudaStream_t s) SHOWN("cudaStreamDestroy");
cudaError_t host_stream_destroy(cudaStream_t s) { return cudaStreamDestroy(s); }
cudaError_t host_stream_synchronize(cudaStream_t s) SHOWN("cudaStreamSynchronize");
cudaError_t host_stream_synchronize(cudaStream_t s) { return cudaStreamSynchronize(s); }
cudaError_t host_stream_query(cudaStream_t s) SHOWN("cudaStreamQuery");
cudaError_t host_stream_query(cudaStream_t s) { return cudaStreamQuery(s); }
