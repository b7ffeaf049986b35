// Copies and memset.
#include <string.h>

#include "errors.h"
#include "heap.h"
#include "settings.h"
#include "streams.h"

using namespace uly_emulated;

static bool fits(cudaMemcpyKind kind, Place dst, Place src) {
  if (dst == Place::invalid || src == Place::invalid) return false;
  bool to = dst == Place::device, from = src == Place::device;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to && !from;
    case cudaMemcpyHostToDevice: return to && !from;
    case cudaMemcpyDeviceToHost: return !to && from;
    case cudaMemcpyDeviceToDevice: return to && from;
    default: return true;
  }
}

static const char *place_name(Place p) {
  const char *n[] = {"pageable memory", "pinned memory", "device memory", "memory outside of any allocation"};
  return n[(int)p];
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (width == 0 || rows == 0) return cudaSuccess;
  if (!known(stream)) return set_error(cudaErrorInvalidResourceHandle);
  CUstream_st *s = resolve(stream);
  if (dst_pitch < width || src_pitch < width) return set_error(cudaErrorInvalidValue);
  Place to = place(dst, (rows - 1) * dst_pitch + width), from = place(src, (rows - 1) * src_pitch + width);
  if (!fits(kind, to, from))
    return set_error(cudaErrorInvalidValue, format("a copy of kind %d of %zu x %zu bytes from %s to %s", (int)kind,
                                                   rows, width, place_name(from), place_name(to)));
  if (s->failure) return set_error(s->failure);
  auto copy = [=](const char *source, size_t pitch) {
    for (size_t r = 0; r < rows; r++) memcpy(static_cast<char *>(dst) + r * dst_pitch, source + r * pitch, width);
  };
  if (from == Place::pageable) { // the source may be reused when the call returns
    auto staged = std::make_shared<std::string>();
    staged->resize(rows * width);
    for (size_t r = 0; r < rows; r++)
      memcpy(&(*staged)[r * width], static_cast<const char *>(src) + r * src_pitch, width);
    s->queue.push_back({[=]() -> Failure {
                          copy(staged->data(), width);
                          return {};
                        },
                        nullptr, nullptr});
  } else {
    s->queue.push_back({[=]() -> Failure {
                          copy(static_cast<const char *>(src), src_pitch);
                          return {};
                        },
                        nullptr, nullptr});
  }
  return to == Place::pageable ? synchronize(held, s) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  return cudaMemcpy2DAsync(dst, bytes, src, bytes, bytes, 1, kind, s);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
  cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, nullptr);
  return e != cudaSuccess ? e : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (bytes == 0) return cudaSuccess;
  if (!known(stream)) return set_error(cudaErrorInvalidResourceHandle);
  CUstream_st *s = resolve(stream);
  Place at = place(p, bytes);
  if (at == Place::invalid || at == Place::pageable)
    return set_error(cudaErrorInvalidValue, format("a memset of %zu bytes of %s", bytes, place_name(at)));
  if (s->failure) return set_error(s->failure);
  s->queue.push_back({[=]() -> Failure {
                        clear(p, value, bytes);
                        return {};
                      },
                      nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }
