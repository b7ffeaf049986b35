// The plug-in's function table (uly_cuda_api in kernels.h) and its only exported symbol.
#include "device.h"
#include "external.h"
#include "libraries/libraries.h"
#include "probe.h"
#include "processes.h"

namespace {

// forwarded wraps a function of another file in guarded (device.h).
template <auto function, class... A> int32_t forwarded(uly_device *d, A... a) {
  return guarded(d, [&] { return function(d, a...); });
}

// nccl_abort and nccl_error may run on another thread during a call. Therefore they do not write
// the device's message.
int32_t api_nccl_abort(uly_device *d, uly_nccl *n) {
  try {
    cudaSetDevice(d->ordinal);
    return nccl_abort(d, n);
  } catch (...) { return ULY_INTERNAL; }
}

int32_t api_nccl_error(uly_device *d, uly_nccl *n, char *text, int64_t text_bytes) {
  try {
    cudaSetDevice(d->ordinal);
    return nccl_error(d, n, text, text_bytes);
  } catch (...) { return ULY_INTERNAL; }
}

const uly_cuda_api table = {
    ULY_CUDA_ABI,
    sizeof(uly_cuda_api),
    ULY_OPERATIONS_SUM,
    probe,
    api_open,
    api_close,
    api_error,
    api_info,
    api_alloc,
    api_free,
    api_alloc_host,
    api_free_host,
    api_stream_create,
    api_stream_destroy,
    api_stream_group,
    api_stream_sync,
    api_stream_query,
    api_stream_wait,
    api_event_create,
    api_event_destroy,
    api_event_record,
    api_event_sync,
    api_event_query,
    api_enqueue,
    api_workspace,
    api_delta_sizes,
    api_kernel_of,
    forwarded<memory_handle>,
    forwarded<memory_open>,
    forwarded<memory_close>,
    forwarded<event_handle>,
    forwarded<event_open>,
    forwarded<copy_bytes>,
    forwarded<peer_access>,
    forwarded<nccl_ordered>,
    forwarded<nccl_id>,
    forwarded<nccl_init>,
    forwarded<nccl_close>,
    api_nccl_abort,
    api_nccl_error,
    forwarded<nccl_all_to_all>,
    forwarded<nccl_all_gather>,
    forwarded<nccl_all_reduce>,
    forwarded<nccl_reduce_scatter>,
    forwarded<nccl_broadcast>,
    forwarded<nccl_send_recv>,
    forwarded<stream_wrap>,
    forwarded<memory_kind>,
    thread_context,
    thread_context_set,
};

} // namespace

extern "C" __attribute__((visibility("default"))) const uly_cuda_api *uly_cuda_plugin(uint32_t abi, uint32_t *have) {
  if (have) *have = ULY_CUDA_ABI;
  return abi == ULY_CUDA_ABI ? &table : nullptr;
}
