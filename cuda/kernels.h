// The C interface of libulysses_cuda.so, the CUDA plug-in. Go opens the file at run time (load.go).
// Its only exported symbol is uly_cuda_plugin, which returns a table of functions. device/ops.go
// and device/delta.go document what each operation computes. The arguments of operations are the
// structs of package device, byte for byte (operations.h).
//
// Every function returns a code of internal/status (0 = success). After a failure, error(device)
// returns the message. A device must be used by one thread at a time, except for nccl_abort and
// nccl_error. Every call makes the device's GPU the current one of the calling thread. The plug-in
// never prints, exits or throws.
#ifndef ULYSSES_CUDA_KERNELS_H
#define ULYSSES_CUDA_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ULY_CUDA_ABI 11u

// The largest head sizes that the kernels of attention and of the gated delta rule support.
enum { ULY_ATTENTION_HEAD = 256, ULY_DELTA_HEAD = 256 };

enum { ULY_F32 = 1, ULY_BF16, ULY_F16, ULY_F64, ULY_I32, ULY_I64, ULY_U8 }; // tensor.DType
enum { ULY_HOST = 0, ULY_CUDA = 1 };                                        // tensor.Place

// uly_tensor is tensor.Tensor, byte for byte. Strides count elements.
typedef struct {
  void *data;
  uint8_t dtype, where;
  int8_t ndim;
  int64_t shape[8], stride[8];
} uly_tensor;

// Codes of internal/status that the plug-in returns.
enum {
  ULY_OK = 0,
  ULY_INVALID_ARGUMENT = 1,
  ULY_UNSUPPORTED = 3,
  ULY_OUT_OF_MEMORY = 4,
  ULY_COMM = 5,
  ULY_DEVICE = 6,
  ULY_INTERNAL = 10
};

#ifdef __cplusplus
#define ULY_SIZE(type, bytes) static_assert(sizeof(type) == bytes, #type " differs from the struct of package device");
#else
#define ULY_SIZE(type, bytes) _Static_assert(sizeof(type) == bytes, #type " differs from the struct of package device");
#endif
ULY_SIZE(uly_tensor, 144)

// A Go slice of int64 in host memory, valid until the call returns. data is NULL for a nil slice.
typedef struct {
  const int64_t *data;
  int64_t length, capacity;
#ifdef __cplusplus
  operator const int64_t *() const { return data; }
  int64_t documents() const { return data ? length - 1 : 0; } // for a list of bounds, such as cu_q
#endif
} uly_list;

typedef struct {
  int64_t lo, hi;
} uly_range; // device.Range

typedef struct {
  const uly_range *data;
  int64_t length, capacity;
} uly_ranges;

typedef struct {
  int64_t left, right; // negative = unbounded
} uly_window;          // device.Window

#include "operations.h"

// Copy takes any strides and can convert types. One side may be host memory, which must then be
// dense and have the type of the other side. A copy from the host has read src when the call
// returns. A copy to the host has written dst when the stream is synchronized.

typedef struct {
  int64_t saved, forward, backward, state;
} uly_delta_sizes; // bytes

// RANK_SUM computes dst[i] = src[0][i] ∘ src[1][i] ∘ … in rank order, in F32 (in F64, I32 and I64
// for these types). Communicators use it for reductions over mapped memory. dst may be one of src.
enum { ULY_MAX_RANKS = 64 };
typedef struct {
  void *dst;
  const void *src[ULY_MAX_RANKS];
  int64_t n;
  int32_t ranks, dtype;
  int32_t how; // comm.Op: 0 sum, 1 max (a NaN stays), 2 min
} uly_rank_sum;

// All operations: the operations of package device, and RANK_SUM, which only communicators use.
#define ULY_ALL_OPERATIONS(X) ULY_OPERATIONS(X) X(RANK_SUM, rank_sum, uly_rank_sum)
#define ULY_ENUMERATOR(op, name, args) ULY_OP_##op,
typedef enum { ULY_ALL_OPERATIONS(ULY_ENUMERATOR) ULY_OPS } uly_op;
#undef ULY_ENUMERATOR

typedef struct uly_device uly_device;
typedef struct uly_stream uly_stream;
typedef struct uly_event uly_event;
typedef struct uly_nccl uly_nccl;

// What a stream is for. Streams for communication have little scratch. Where blocks of kernels wait
// for a free multiprocessor, blocks of a stream with priority come first.
enum { ULY_STREAM_COMPUTE, ULY_STREAM_COMM, ULY_STREAM_PRIORITY };

// uly_library describes one library that the plug-in opens at run time. The plug-in links none.
typedef struct {
  char name[32];    // "cuDNN"
  char found[512];  // version and path, or why the library was not found
  char effect[256]; // what is slower or unavailable without the library; empty if it was found
  char fix[256];    // how to install it; empty if it was found
  int32_t ok;
} uly_library;

enum { ULY_LIBRARIES = 5 }; // driver, cuBLASLt, cuDNN, NVRTC, NCCL

typedef struct {
  int32_t devices; // GPUs that this process sees
  char text[512];  // why there is none
  uly_library library[ULY_LIBRARIES];
} uly_probe;

// The ordinal of an absent GPU. Its workspace, delta_sizes and kernel_of return what they return
// for a Hopper GPU with cuDNN, and need no driver. Every other function fails.
enum { ULY_NO_GPU = -1 };

typedef struct {
  int32_t ordinal;       // or ULY_NO_GPU
  int32_t deterministic; // every result must be bitwise reproducible
  const char *kernels;   // ULYSSES_KERNEL: "attention_forward=own,gemm=naive", or NULL
} uly_open;

typedef struct {
  char name[128];    // "NVIDIA H200"
  char kernels[256]; // "sm_90, cuBLASLt 13.1, cuDNN 9.19"; ranks must agree on it
  char uuid[40];
  int64_t memory, free;
  int32_t sm, multiprocessors, driver;
  int32_t emulated; // the host emulates a GPU, for tests
} uly_info;

enum { ULY_HANDLE = 64, ULY_NCCL_ID = 128 };

// Kinds of memory: host memory that CUDA does not know, host memory that is pinned or registered
// with CUDA, GPU memory, managed memory.
enum { ULY_MEMORY_HOST = 0, ULY_MEMORY_PINNED, ULY_MEMORY_GPU, ULY_MEMORY_MANAGED };

typedef struct uly_cuda_api {
  uint32_t abi, size;
  uint32_t operations; // ULY_OPERATIONS_SUM

  int32_t (*probe)(uly_probe *out);
  int32_t (*open)(const uly_open *how, uly_device **out, char *text, int64_t text_bytes);
  void (*close)(uly_device *);
  const char *(*error)(uly_device *); // of the last call that failed
  int32_t (*info)(uly_device *, uly_info *out);

  int32_t (*alloc)(uly_device *, int64_t bytes, void **out); // zeroed, aligned to 256
  int32_t (*free)(uly_device *, void *);
  int32_t (*alloc_host)(uly_device *, int64_t bytes, void **out); // pinned
  int32_t (*free_host)(uly_device *, void *);

  int32_t (*stream_create)(uly_device *, int32_t use, uly_stream **out); // use: ULY_STREAM_...
  int32_t (*stream_destroy)(uly_device *, uly_stream *);
  // Between opening and closing a group, the calls of Copy and Rope must be independent. Those that
  // fit a Move (kernels/moves.h) are launched together. Any other use of the stream launches them.
  int32_t (*stream_group)(uly_device *, uly_stream *, int32_t open);
  int32_t (*stream_sync)(uly_device *, uly_stream *);
  int32_t (*stream_query)(uly_device *, uly_stream *, int32_t *done);
  int32_t (*stream_wait)(uly_device *, uly_stream *, uly_event *);
  // shared: the event may be opened by other processes
  int32_t (*event_create)(uly_device *, int32_t shared, uly_event **out);
  int32_t (*event_destroy)(uly_device *, uly_event *);
  int32_t (*event_record)(uly_device *, uly_event *, uly_stream *);
  int32_t (*event_sync)(uly_device *, uly_event *);
  int32_t (*event_query)(uly_device *, uly_event *, int32_t *done);

  int32_t (*enqueue)(uly_device *, uly_stream *, int32_t op, const void *args, int64_t args_bytes);
  // Bytes of the workspace of a call, or of its gradient. The document bounds and the memory of
  // tensors may be absent.
  int32_t (*workspace)(uly_device *, const uly_attention *, int32_t backward, int64_t *bytes);
  int32_t (*delta_sizes)(uly_device *, const uly_gated_delta *, uly_delta_sizes *out);
  // The name of the kernel that enqueue would choose. ULY_UNSUPPORTED, with the reason, if no
  // kernel supports the call. If the document bounds of attention are absent, the kernel is one
  // that supports some bounds; gradients and memory may be absent as well.
  int32_t (*kernel_of)(uly_device *, int32_t op, const void *args, const char **kernel);

  // Memory and events of other processes on this node.
  // The handle is that of the allocation that contains p; offset is p's position in it. generation
  // differs between any two allocations of a process, also if they have the same handle.
  int32_t (*memory_handle)(uly_device *, const void *p, char handle[ULY_HANDLE], int64_t *offset, uint64_t *generation);
  int32_t (*memory_open)(uly_device *, const char handle[ULY_HANDLE], void **out);
  int32_t (*memory_close)(uly_device *, void *);
  int32_t (*event_handle)(uly_device *, uly_event *, char handle[ULY_HANDLE]);
  int32_t (*event_open)(uly_device *, const char handle[ULY_HANDLE], uly_event **out);
  // Copies raw bytes between device memory, or between device memory and pinned memory.
  int32_t (*copy_bytes)(uly_device *, uly_stream *, void *dst, const void *src, int64_t bytes);

  // Lets kernels of this GPU access the memory of another GPU of this process. Sets *can to 0 if
  // the hardware does not support it.
  int32_t (*peer_access)(uly_device *, int32_t ordinal, int32_t *can);

  // Sets *ordered to 1 if NCCL starts the kernels of all communicators of a GPU in the order of the
  // calls, so that they may be on several streams; otherwise to 0.
  int32_t (*nccl_ordered)(uly_device *, int32_t *ordered);
  int32_t (*nccl_id)(uly_device *, char id[ULY_NCCL_ID]);
  int32_t (*nccl_init)(uly_device *, const char id[ULY_NCCL_ID], int32_t ranks, int32_t rank, uly_nccl **out);
  int32_t (*nccl_close)(uly_device *, uly_nccl *);
  int32_t (*nccl_abort)(uly_device *, uly_nccl *);
  // The error of the communicator since its creation, with the message in text. A collective that
  // has waited for peers on the GPU for longer than ULYSSES_TIMEOUT is an error. Any thread may
  // call this function while another thread is in any call.
  int32_t (*nccl_error)(uly_device *, uly_nccl *, char *text, int64_t text_bytes);
  // Offsets and counts in bytes, one for each rank.
  int32_t (*nccl_all_to_all)(uly_device *, uly_nccl *, uly_stream *, void *dst, const int64_t *recv_at,
                             const int64_t *recv_bytes, const void *src, const int64_t *send_at,
                             const int64_t *send_bytes);
  // Each rank sends `bytes`, and gets the blocks of all ranks. src may be this rank's block of dst.
  int32_t (*nccl_all_gather)(uly_device *, uly_nccl *, uly_stream *, void *dst, const void *src, int64_t bytes);
  // Sums over the ranks, in NCCL's order: of n elements in place, or of this rank's n elements of
  // src. dst may be this rank's block of src.
  int32_t (*nccl_all_reduce)(uly_device *, uly_nccl *, uly_stream *, void *x, int64_t n, int32_t dtype);
  int32_t (*nccl_reduce_scatter)(uly_device *, uly_nccl *, uly_stream *, void *dst, const void *src, int64_t n,
                                 int32_t dtype);
  int32_t (*nccl_broadcast)(uly_device *, uly_nccl *, uly_stream *, void *x, int64_t bytes, int32_t root);
  int32_t (*nccl_send_recv)(uly_device *, uly_nccl *, uly_stream *, void *recv, int64_t recv_bytes, int32_t from,
                            const void *send, int64_t send_bytes, int32_t to);

  // For host programs that use CUDA themselves. stream_wrap makes *s stand for the host program's
  // cudaStream_t `external` (NULL and 1: the legacy default stream; 2: the stream of the thread).
  // If *s exists, it is changed. The result has no scratch and supports only stream_wait and
  // event_record.
  int32_t (*stream_wrap)(uly_device *, void *external, uly_stream **s);
  // ordinal: of the GPU; -1 for host memory
  int32_t (*memory_kind)(uly_device *, const void *p, int32_t *kind, int32_t *ordinal);
  // thread_save returns the CUDA context of the calling thread, and thread_restore makes it current
  // again.
  void *(*thread_save)(void);
  void (*thread_restore)(void *was);
} uly_cuda_api;

// uly_cuda_plugin returns the table, or NULL if this plug-in has another ABI version than `abi`.
// *have is the plug-in's version.
const uly_cuda_api *uly_cuda_plugin(uint32_t abi, uint32_t *have);

#ifdef __cplusplus
}
#endif
#endif
