// cudaMalloc and related functions, and CUDA IPC of memory.
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"
#include "errors.h"
#include "heap.h"
#include "settings.h"
#include "slots.h"
#include "streams.h"

using namespace uly_emulated;

// replace_mapper changes an entry in the list of processes that map an allocation.
static void replace_mapper(Notice *n, int32_t was, int32_t now) {
  for (auto &m : n->mapper) {
    int32_t expected = was;
    if (m.compare_exchange_strong(expected, now)) return;
  }
}

static cudaError_t allocate(void **out, size_t bytes, Place place) {
  return heap_allocate(out, bytes, place, this_thread().device) ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}

static cudaError_t release(void *v, Place place) {
  if (!v) return cudaSuccess;
  std::unique_lock<std::mutex> held(lock);
  auto it = heap.all.find(static_cast<char *>(v));
  if (it == heap.all.end() || it->second.place != place || it->second.offset < 0)
    return set_error(cudaErrorInvalidValue);
  drain(held); // as cudaFree does
  it = heap.all.find(static_cast<char *>(v));
  if (it == heap.all.end()) return set_error(cudaErrorInvalidValue);
  std::string text = heap_free(it);
  if (text.empty()) return cudaSuccess;
  text = "cudaFree: something " + text;
  // printed as well, because programs that free memory at their end often ignore the result
  fprintf(stderr, "emulated GPU: %s\n", text.c_str());
  return set_error(cudaErrorIllegalAddress, text);
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  return allocate(p, bytes, Place::device);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *v) {
  std::lock_guard<std::mutex> held(lock);
  *out = {};
  out->device = -2; // as CUDA returns for unknown memory
  Place at = place(v, 1);
  if (at != Place::device && at != Place::pinned) return cudaSuccess;
  const Allocation &a = (--heap.all.upper_bound(static_cast<char *>(const_cast<void *>(v))))->second;
  out->type = at == Place::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = a.device;
  out->devicePointer = const_cast<void *>(v);
  if (at == Place::pinned) out->hostPointer = out->devicePointer;
  return cudaSuccess;
}

// device_allocation finds the allocation that contains device memory v; NULL if there is none. The
// caller holds the lock.
static const std::pair<char *const, Allocation> *device_allocation(const void *v) {
  if (place(v, 1) != Place::device) return nullptr;
  return &*--heap.all.upper_bound(static_cast<char *>(const_cast<void *>(v)));
}

bool uly_emulated::range(const void *v, void **base, size_t *bytes) {
  std::lock_guard<std::mutex> held(lock);
  auto *found = device_allocation(v);
  if (!found) return false;
  *base = found->first;
  *bytes = found->second.bytes;
  return true;
}

bool uly_emulated::generation(const void *v, uint64_t *number) {
  std::lock_guard<std::mutex> held(lock);
  auto *found = device_allocation(v);
  if (found) *number = found->second.generation;
  return found;
}

cudaError_t cudaFree(void *p) { return release(p, Place::device); }
cudaError_t cudaMallocHost(void **p, size_t bytes) {
  if (bytes > (size_t)setting("ULYSSES_EMULATED_PINNED", INT64_MAX)) return set_error(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> held(lock);
  return allocate(p, bytes, Place::pinned);
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return cudaMallocHost(p, bytes); }
cudaError_t cudaFreeHost(void *p) { return release(p, Place::pinned); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  std::lock_guard<std::mutex> held(lock);
  *total = (size_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30);
  *free = *total > heap.used ? *total - heap.used : 0;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *v) {
  std::lock_guard<std::mutex> held(lock);
  auto *p = static_cast<char *>(v);
  auto it = heap.all.upper_bound(p);
  if (it == heap.all.begin()) return set_error(cudaErrorInvalidValue);
  --it;
  Allocation &a = it->second;
  if (p >= it->first + a.bytes || a.place != Place::device || a.offset < 0) return set_error(cudaErrorInvalidValue);
  int64_t at = 0;
  const int fd = file_of(a, &at);
  handle_write(fd, at, a.mapped, a.lead, (int64_t)a.bytes, h->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
  std::lock_guard<std::mutex> held(lock);
  Handle h;
  if (flags != cudaIpcMemLazyEnablePeerAccess || !handle_read(handle.reserved, &h) || h.bytes <= 0)
    return set_error(cudaErrorInvalidValue);
  // a GPU also refuses a handle of its own process
  if (h.pid == (int32_t)getpid()) return set_error(cudaErrorDeviceUninitialized);
  if (setting("ULYSSES_EMULATED_IPC", 2) < 2) return set_error(cudaErrorMapBufferObjectFailed);
  std::string key(handle.reserved, sizeof handle.reserved);
  for (auto &[at, a] : heap.all)
    if (a.handle == key) {
      a.refs++;
      *p = at;
      return cudaSuccess;
    }
  Allocation a;
  a.bytes = (size_t)h.bytes;
  a.device = this_thread().device;
  a.lead = (size_t)h.lead;
  a.mapped = (size_t)h.mapped;
  a.handle = key;
  char *start = handle_map(h, a.mapped);
  if (!start) return set_error(cudaErrorInvalidResourceHandle);
  make_fences(start + a.lead, a);
  heap.all[start + a.lead] = a;
  *p = start + a.lead;
  replace_mapper(a.notice(start + a.lead), 0, (int32_t)getpid());
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *p) {
  std::unique_lock<std::mutex> held(lock);
  auto it = heap.all.find(static_cast<char *>(p));
  if (it == heap.all.end() || it->second.offset >= 0) return set_error(cudaErrorInvalidValue);
  drain(held);
  it = heap.all.find(static_cast<char *>(p));
  if (it == heap.all.end() || --it->second.refs > 0) return cudaSuccess;
  replace_mapper(it->second.notice(it->first), (int32_t)getpid(), 0);
  munmap(it->first - it->second.lead, it->second.mapped + page);
  heap.all.erase(it);
  return cudaSuccess;
}
