// Device memory, pinned host memory, and the limits of shared memory.
#include <string.h>

#include "device.h"

int32_t allocate(Device *d, int64_t bytes, const char *what, void **out) {
  *out = nullptr;
  if (bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "%s: %lld bytes", what, (long long)bytes);
  size_t n = bytes ? (size_t)bytes : 1; // every buffer needs an address
  cudaError_t e = cudaMalloc(out, n);
  if (e == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    *out = nullptr;
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return fail(d, ULY_OUT_OF_MEMORY,
                "%s: out of GPU memory: %lld bytes requested on %s; %lld of %lld bytes are free; end other processes "
                "on this GPU (nvidia-smi lists them), or start fewer ranks on it",
                what, (long long)bytes, d->name, (long long)free, (long long)total);
  }
  return check(d, e, what);
}

static int32_t zero(Device *d, void *p, int64_t bytes) {
  TRY(check(d, cudaMemsetAsync(p, 0, (size_t)bytes, d->setup), "zeroing memory"));
  return check(d, cudaStreamSynchronize(d->setup), "zeroing memory");
}

int32_t api_alloc(uly_device *d, int64_t bytes, void **out) {
  return guarded(d, [&] {
    TRY(allocate(of(d), bytes, "device memory", out));
    int32_t code = zero(of(d), *out, bytes);
    if (code != ULY_OK) {
      cudaFree(*out);
      *out = nullptr;
      return code;
    }
    of(d)->memory[static_cast<char *>(*out)] = bytes;
    return (int32_t)ULY_OK;
  });
}

int32_t api_free(uly_device *d, void *p) {
  return guarded(d, [&] {
    if (!p) return (int32_t)ULY_OK;
    if (!of(d)->memory.erase(static_cast<char *>(p)))
      return fail(d, ULY_INVALID_ARGUMENT, "Free: %p is not the start of an allocation of this device", p);
    return check(d, cudaFree(p), "Free");
  });
}

int32_t api_alloc_host(uly_device *d, int64_t bytes, void **out) {
  return guarded(d, [&] {
    *out = nullptr;
    if (bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "pinned memory: %lld bytes", (long long)bytes);
    size_t n = bytes ? (size_t)bytes : 1;
    cudaError_t e = cudaHostAlloc(out, n, cudaHostAllocPortable);
    if (e == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return fail(d, ULY_OUT_OF_MEMORY,
                  "pinned memory: the host cannot pin %lld bytes; raise ulimit -l or the job's memory limit",
                  (long long)bytes);
    }
    TRY(check(d, e, "pinned memory"));
    memset(*out, 0, n); // the CUDA runtime may return memory with old content
    return (int32_t)ULY_OK;
  });
}

int32_t api_free_host(uly_device *d, void *p) {
  return guarded(d, [&] { return p ? check(d, cudaFreeHost(p), "freeing pinned memory") : (int32_t)ULY_OK; });
}

bool allocation(uly_device *d, const void *p, char **base, int64_t *bytes) {
  auto *at = const_cast<char *>(static_cast<const char *>(p));
  auto it = of(d)->memory.upper_bound(at);
  if (it == of(d)->memory.begin()) return false;
  --it;
  if (at >= it->first + it->second) return false;
  *base = it->first, *bytes = it->second;
  return true;
}

int32_t allow_shared(uly_device *d, const void *kernel, int64_t bytes, std::atomic<uint64_t> &allowed,
                     const char *what) {
  const uint64_t gpu = d->ordinal < 64 ? 1ull << d->ordinal : 0;
  if (allowed.load() & gpu) return ULY_OK;
  TRY(check(d, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), what));
  allowed.fetch_or(gpu);
  return ULY_OK;
}
