// Declarations that all sources of the plug-in share: the device and its streams, error handling,
// and the registration of kernels.
//
// The sources are built twice: by nvcc for GPUs, and by g++ with -DULY_EMULATED for tests. In the
// second build, emulated/ replaces the CUDA language and runtime, and every kernel runs on the
// host, thread by thread, in a random order that only its barriers restrict. The second build tests
// indices, barriers and the order between streams. It does not test speed, tensor cores or
// libraries.
#pragma once

#include "build.h"
#include ULY_CUDA_HEADER

#include <stdint.h>
#include <stdio.h>

#include <atomic>
#include <initializer_list>
#include <string>

#include "../kernels.h"

// Kernels are launched by LAUNCH and declare dynamic shared memory with SHARED. Otherwise they are
// plain CUDA and use blockIdx, threadIdx, __shared__, __syncthreads(), __syncwarp(), __shfl_*_sync
// with full warps, and atomicAdd. Only gpu/instructions.h has inline assembly;
// emulated/instructions.h has the same functions in plain C++. Blocks are one-dimensional and have
// a multiple of 32 threads. All threads of a block must reach every barrier.

struct uly_device {
  // shared_limit: bytes of dynamic shared memory that a block may have
  int ordinal = 0, sm = 0, multiprocessors = 0, shared_limit = 0;
  // absent: there is no GPU; only sizes and names of kernels can be queried (ULY_NO_GPU)
  bool deterministic = false, emulated = false, absent = false;
  std::string pins; // ULYSSES_KERNEL
  std::string text; // error()
  // device_libraries (libraries.h): handles and plans of cuBLASLt and cuDNN
  void *libraries = nullptr;
};

// uly_fault is an error that only a kernel can detect: an id without a row in the table, or a
// target without a logit. It lies in pinned host memory, 16 bytes aligned to 16, and is zeroed when
// its stream is created. A kernel writes it with one store. stream_sync calls fault_error after the
// wait.
struct uly_fault {
  int32_t op, id; // op: 0 = none, else 1 + uly_op
  int64_t at;     // token or row
};
// fault_error returns the error of a fault and clears it; ULY_OK if there is none. The stream must
// be idle.
int32_t fault_error(uly_device *d, uly_fault *fault);

// A stream has its own scratch memory, because operations on different streams run concurrently. An
// operation may use all of it; its content has no meaning between operations.
struct uly_stream {
  cudaStream_t s = nullptr;
  char *scratch = nullptr;
  int64_t scratch_bytes = 0;
  uly_fault *fault = nullptr;
  // a stream of the host program, for ordering only: scratch, fault and queue are NULL
  bool wrapped = false;
  struct Moves *queue = nullptr, *group = nullptr; // group: queue while a group is open, else NULL
};

// Groups (kernels/moves.h). launch_group launches the queued calls of an open group.
void open_group(uly_stream *s);
void launch_group(uly_stream *s);
void close_group(uly_stream *s);
struct Moves *new_queue();
void delete_queue(struct Moves *queue);

struct uly_event {
  cudaEvent_t e = nullptr;
  bool opened = false;
};

// fail stores the message in the device and returns the code.
int32_t fail(uly_device *d, int32_t code, const char *format, ...) __attribute__((format(printf, 3, 4)));

// check converts a CUDA error to a status code; `what` names the operation in the message.
// check_launch checks the most recent kernel launch.
int32_t check(uly_device *d, cudaError_t e, const char *what);
inline int32_t check_launch(uly_device *d, const char *what) { return check(d, cudaGetLastError(), what); }

// allow_shared lets a kernel have `bytes` of dynamic shared memory. CUDA refuses launches with more
// than 48 KiB otherwise. `allowed` has a bit for each GPU on which it was done.
int32_t allow_shared(uly_device *d, const void *kernel, int64_t bytes, std::atomic<uint64_t> &allowed,
                     const char *what);

// allocation finds the allocation of this device that contains p. It returns false if there is
// none.
bool allocation(uly_device *d, const void *p, char **base, int64_t *bytes);

#define TRY(expression)                      \
  do {                                       \
    int32_t try_code = (expression);         \
    if (try_code != ULY_OK) return try_code; \
  } while (0)

// uly_kernel is one kernel of an operation. Of an operation's kernels, the first that supports a
// call runs it, unless ULYSSES_KERNEL selects another. supports gets the device and the arguments;
// NULL supports every call.
struct uly_kernel {
  int32_t op;
  const char *name; // "cudnn", "own", "naive"
  int32_t (*run)(uly_device *, uly_stream *, const void *args);
  bool (*supports)(uly_device *, const void *args) = nullptr;
};

// RegisterKernels adds kernels to the plug-in when it is loaded. A source in kernels/ ends with
//
//   static const RegisterKernels registered({{ULY_OP_ADD, "own", add}});
//
// The kernels of an operation are tried in the order of this list. One list holds all kernels of an
// operation, except that the kernels of NVIDIA's libraries have a list of their own, which comes
// first (`first`).
struct RegisterKernels {
  RegisterKernels(std::initializer_list<uly_kernel> kernels, bool first = false);
};

// attention_workspace returns the bytes that are enough for every kernel that supports a, or its
// gradient.
int64_t attention_workspace(uly_device *d, const uly_attention *a, bool backward);

// delta_sizes returns the bytes that are enough for every kernel that supports a, its gradient, and
// a DeltaState or DeltaStateGrad of a's tokens.
int32_t delta_sizes(uly_device *d, const uly_gated_delta *a, uly_delta_sizes *out);

// Index arithmetic that can be tested on the host is in headers without CUDA (index.h, …), which
// both kernels and host tests include.
