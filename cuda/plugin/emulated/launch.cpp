// Kernel launches: the checks and the enqueueing. blocks.cpp runs the kernel.
#include <map>

#include "blocks.h"
#include "counts.h"
#include "errors.h"
#include "heap.h"
#include "limits.h"
#include "ptx/run.h"
#include "settings.h"
#include "streams.h"

using namespace uly_emulated;

// by device and kernel: the limit of cudaFuncSetAttribute
static std::map<std::pair<int, const void *>, int> allowed_shared;

void uly_emulated::launch(const Kernel &kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                          const void *const *pointers, int n, std::function<void()> body,
                          std::vector<Argument> arguments) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(stream)) {
    set_error(cudaErrorInvalidResourceHandle);
    return;
  }
  const int device = this_thread().device;
  if (device_of(stream) != device) {
    set_error(cudaErrorInvalidResourceHandle,
              format("kernel %s (%s:%d) is launched in a stream of device %d while device %d is the current one",
                     kernel.name, kernel.file, kernel.line, device_of(stream), device));
    return;
  }
  CUstream_st *s = resolve(stream);
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  auto allowed = allowed_shared.find({device, kernel.address});
  size_t limit = (size_t)(allowed == allowed_shared.end() ? (int)DEFAULT_SHARED : allowed->second);
  std::string why;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) why = "an empty grid or block";
  else if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    why = format("a grid of %u x %u x %u blocks", grid.x, grid.y, grid.z);
  else if (threads > 1024 || block.z > 64) why = format("a block of %llu threads", (unsigned long long)threads);
  else if (threads % 32)
    why = format("a block of %llu threads, which is not a multiple of 32", (unsigned long long)threads);
  else if (shared > limit)
    why =
        format("%zu bytes of dynamic shared memory, more than the limit of %zu (cudaFuncSetAttribute)", shared, limit);
  for (int i = 0; i < n; i++)
    if (pointers[i] && place(pointers[i], 1) == Place::pageable && !setting("ULYSSES_EMULATED_HOST", 0)) {
      set_error(cudaErrorInvalidDevicePointer,
                format("kernel %s (%s:%d) is launched with a pointer to host memory, which a GPU cannot access",
                       kernel.name, kernel.file, kernel.line));
      return;
    }
  if (!why.empty()) {
    set_error(cudaErrorInvalidConfiguration,
              format("kernel %s (%s:%d) is launched with %s", kernel.name, kernel.file, kernel.line, why.c_str()));
    return;
  }
  if (s->failure) {
    set_error(s->failure);
    return;
  }
  s->queue.push_back({[=, body = std::move(body), arguments = std::move(arguments)]() -> Failure {
                        std::string text = check_red_zones();
                        if (!text.empty())
                          return {cudaErrorIllegalAddress, format("before kernel %s (%s:%d), something %s", kernel.name,
                                                                  kernel.file, kernel.line, text.c_str())};
                        if (!skipped()) {
                          const Foreign foreign(device);
                          text = as_ptx() ? ptx::run_grid(kernel, grid, block, shared, arguments)
                                          : run_grid(kernel, grid, block, shared, body);
                        }
                        if (!text.empty()) return {cudaErrorLaunchFailure, text};
                        if (counting()) count_launch(kernel, grid, block, shared);
                        text = check_red_zones();
                        if (!text.empty())
                          return {cudaErrorIllegalAddress,
                                  format("kernel %s (%s:%d) %s", kernel.name, kernel.file, kernel.line, text.c_str())};
                        return {};
                      },
                      nullptr, nullptr});
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute what, int value) {
  std::lock_guard<std::mutex> held(lock);
  if (what == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || value > most_shared()) return set_error(cudaErrorInvalidValue);
    allowed_shared[{this_thread().device, kernel}] = value;
  }
  return cudaSuccess;
}
