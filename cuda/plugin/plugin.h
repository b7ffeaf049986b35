// What all sources of the plug-in share: the device and its streams, how a kernel is started, how a
// failure is told, and the rows of which the operation table is made.
//
// The sources are written once and built twice: by nvcc for GPUs, and by g++ with -DULY_EMULATED,
// where emulated/ stands in for the CUDA language and runtime and every kernel runs on the host,
// thread by thread, in an order that its barriers alone restrict. Tests run the second build; it
// proves indices, barriers and order between streams, not speed and not what tensor cores or
// libraries do.
#pragma once

#include "build.h"
#include ULY_CUDA_HEADER

#include <stdint.h>
#include <stdio.h>

#include <initializer_list>
#include <string>

#include "../kernels.h"

// A kernel is started by LAUNCH, declares dynamic shared memory with SHARED, and is otherwise plain
// CUDA: blockIdx, threadIdx, __shared__, __syncthreads(), __syncwarp(), __shfl_*_sync with full
// warps, atomicAdd. Inline assembly is in gpu/instructions.h alone, with a plain form in
// emulated/instructions.h. Blocks are one-dimensional and have a multiple of 32 threads; all threads
// of a block reach every barrier.

struct uly_device {
  // shared_limit: dynamic shared memory a block may have, bytes
  int ordinal = 0, sm = 0, multiprocessors = 0, shared_limit = 0;
  // absent: no GPU, sizes alone are asked for
  bool deterministic = false, emulated = false, absent = false;
  std::string pins;          // ULYSSES_KERNEL
  std::string text;          // error()
  void *libraries = nullptr; // handles of cuBLASLt, cuDNN, plans: their files know
};

// uly_fault is what a kernel found that the host could not know: an id without a row, a target
// without a logit. It lies in pinned host memory, 16 bytes aligned to 16, zeroed at the stream's
// creation; the kernel writes all of it at once, and stream_sync asks found after its wait.
struct uly_fault {
  int32_t op, id; // op: 0 = none, else 1 + uly_op
  int64_t at;     // token or row
};
// found is the error that a fault stands for, once; ULY_OK without one. The stream must be idle.
int32_t found(uly_device *d, uly_fault *fault);

// A stream has scratch of its own, because operations on different streams run at once: an
// operation may use all of it and leaves nothing.
struct uly_stream {
  cudaStream_t s = nullptr;
  char *scratch = nullptr;
  int64_t scratch_bytes = 0;
  uly_fault *fault = nullptr;
  bool wrapped = false; // the program's own, for order alone: without the two above
};

struct uly_event {
  cudaEvent_t e = nullptr;
  bool opened = false;
};

// fail keeps the sentence and returns the code.
int32_t fail(uly_device *d, int32_t code, const char *format, ...) __attribute__((format(printf, 3, 4)));

// check turns what CUDA says into a code; `what` names the operation. started is check of the last
// launch.
int32_t check(uly_device *d, cudaError_t e, const char *what);
inline int32_t started(uly_device *d, const char *what) { return check(d, cudaGetLastError(), what); }

// allocation finds the whole of what the device allocated that p lies in; false for what it did
// not.
bool allocation(uly_device *d, const void *p, char **base, int64_t *bytes);

#define TRY(expression)                      \
  do {                                       \
    int32_t try_code = (expression);         \
    if (try_code != ULY_OK) return try_code; \
  } while (0)

// uly_row is one kernel that can serve an operation. Of the rows of an operation the first that
// fits runs, unless ULYSSES_KERNEL names another. fits is asked with the device and the arguments;
// NULL fits everything.
struct uly_row {
  int32_t op;
  const char *name; // "cudnn", "own", "naive"
  int32_t (*run)(uly_device *, uly_stream *, const void *args);
  bool (*fits)(uly_device *, const void *args) = nullptr;
};

// RegisterRows adds rows to the plug-in when it is loaded. A source in kernels/ ends with
//
//   static const RegisterRows registered({{ULY_OP_ADD, "own", add}});
//
// The rows of an operation are tried in the order of their list; one list holds all of them, except
// that rows over NVIDIA's libraries come `first` from a file of their own.
struct RegisterRows {
  RegisterRows(std::initializer_list<uly_row> rows, bool first = false);
};

// attention_workspace is the bytes that any row which may serve a, or its gradient, needs.
int64_t attention_workspace(uly_device *d, const uly_attention *a, bool backward);

// delta_sizes is the bytes that any row which may serve a and its gradient, or a DeltaState or
// DeltaStateGrad of a's tokens, needs.
int32_t delta_sizes(uly_device *d, const uly_gated_delta *a, uly_delta_sizes *out);

// Shape arithmetic that the host can test is in headers without CUDA in them (index.h, …), which
// kernels and tests include alike.
