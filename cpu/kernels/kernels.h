// The list of the CPU device's kernels, their tables, and the loop that runs the tasks of a kernel.
//
// The same source is built for several instruction sets. isa_avx512.c, isa_avx2.c, isa_neon.c and
// isa_portable.c each choose an instruction set and a vector width VW, then include vec.h and
// kernels.inc, which includes every *.inc. All functions in an .inc are static; only the table at
// the end of each build has a name with the instruction set. Go chooses a table when the device
// opens (../table.go). isa_avx512bf16.c builds ULY_DOT_KERNELS alone, with ULY_DOT defined; its
// device takes the other kernels from isa_avx512.c.
//
// To add a kernel `foo`:
//   1. Declare its arguments, `typedef struct {...} foo_args;`, in a header that is included below,
//      and add X(foo) to ULY_KERNELS.
//   2. Write its body in an .inc that kernels.inc includes:
//      `KERNEL(foo, foo_args) { ... a->x ... task ... }`.
//   3. Call it in Go: `a := (*C.foo_args)(d.args); *a = C.foo_args{...};
//      return d.run(C.K_foo, tasks)`.
//
// A kernel function computes one task of a run. Its arguments are
//   a        the argument struct, the same for all tasks, at most ULY_ARGS_BYTES;
//   task     0 <= task < tasks; each task runs once, on any worker, in any order;
//   worker   0 <= worker < workers;
//   scratch  ULY_SCRATCH_BYTES that this worker alone uses, page-aligned, with undefined content.
// The result of a task must depend on task and arguments alone, never on worker or on the number of
// workers. Therefore results are bitwise equal for any number of threads. A task should take 20 µs
// or more. A run of one task wakes no other thread.
#pragma once
#include <stdint.h>

#define ULY_SCRATCH_BYTES (1 << 20)
#define ULY_ARGS_BYTES 4096

typedef void (*uly_kernel)(const void *args, int64_t task, int64_t worker, void *scratch);

// Headers of argument structs.
#include "peak.h"
#include "gemm.h"
#include "attention.h"
#include "delta.h"
#include "axes.h"
#include "copy.h"
#include "elementwise.h"
#include "reduce.h"
#include "norm.h"
#include "rope.h"
#include "swiglu.h"
#include "sigmoidgate.h"
#include "gatednorm.h"
#include "conv1d.h"
#include "deltagates.h"
#include "dropout.h"
#include "embedding.h"
#include "route.h"
#include "crossentropy.h"
#include "optimizer.h"

// Every kernel, one X(name) a line.
#define ULY_KERNELS(X)     \
  X(peak)                  \
  X(gemm)                  \
  X(attention_forward)     \
  X(attention_backward)    \
  X(attention_reduce)      \
  X(attention_heads)       \
  X(delta_forward)         \
  X(delta_backward)        \
  X(delta_add_heads)       \
  X(delta_state)           \
  X(delta_state_grad)      \
  X(copy)                  \
  X(transpose)             \
  X(fill)                  \
  X(add)                   \
  X(scale)                 \
  X(column_sum)            \
  X(column_fold)           \
  X(sum)                   \
  X(norm_forward)          \
  X(norm_backward)         \
  X(rope_table)            \
  X(rope)                  \
  X(swiglu_forward)        \
  X(swiglu_backward)       \
  X(swiglu_weighted)       \
  X(sigmoid_gate_forward)  \
  X(sigmoid_gate_backward) \
  X(gated_norm_forward)    \
  X(gated_norm_backward)   \
  X(conv1d_forward)        \
  X(conv1d_backward)       \
  X(delta_gates_forward)   \
  X(delta_gates_backward)  \
  X(delta_gates_fold)      \
  X(dropout)               \
  X(embed_forward)         \
  X(embed_backward)        \
  X(route_tokens)          \
  X(route_sort)            \
  X(route_sums)            \
  X(route_backward)        \
  X(spread_rows)           \
  X(combine_rows)          \
  X(cross_entropy)         \
  X(adamw)                 \
  X(sgd)

// The kernels that isa_avx512bf16.c builds. Their products of BF16 multiply pairs (VDPBF16PS).
// BFDOT of AArch64 is not used: it rounds to odd, and the errors of products exceeded their bound.
#define ULY_DOT_KERNELS(X) \
  X(peak)                  \
  X(gemm)                  \
  X(attention_forward)     \
  X(attention_backward)

#define ULY_ENUM(name) K_##name,
enum { ULY_KERNELS(ULY_ENUM) K_COUNT };
#undef ULY_ENUM

// The tables, indexed by K_name. If the compiler's target does not have the instruction set, all
// entries are NULL.
extern const uly_kernel uly_kernels_avx512bf16[K_COUNT], uly_kernels_avx512[K_COUNT], uly_kernels_avx2[K_COUNT],
    uly_kernels_neon[K_COUNT], uly_kernels_portable[K_COUNT];

// The kernels that keep denormals: they move values, or add or multiply two. The other kernels
// treat denormal inputs and results as zero, because a processor needs 100 times as long for them.
// A sharp softmax, a strong decay and the moments of table rows that no token uses produce many
// denormals.
#define ULY_EXACT_KERNELS(X) \
  X(copy)                    \
  X(transpose)               \
  X(fill)                    \
  X(add)                     \
  X(scale)                   \
  X(embed_forward)           \
  X(embed_backward)

// uly_flushes returns 1 if a kernel treats denormals as zero.
static inline int32_t uly_flushes(int32_t kernel) {
#define ULY_KEEPS(name) \
  if (kernel == K_##name) return 0;
  ULY_EXACT_KERNELS(ULY_KEEPS)
#undef ULY_KEEPS
  return 1;
}

// uly_mode returns the floating-point mode of the thread, and uly_set_mode sets it. In a mode with
// ULY_FLUSH, denormals are zero. The compiler may move arithmetic across uly_set_mode, but no loads
// and stores: operands and results of arithmetic in a mode must be in memory.
#if defined(__x86_64__)
#define ULY_FLUSH UINT64_C(0x8040) // FTZ and DAZ of MXCSR
static inline uint64_t uly_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void uly_set_mode(uint64_t mode) {
  __asm__ volatile("" ::: "memory");
  __builtin_ia32_ldmxcsr((uint32_t)mode);
  __asm__ volatile("" ::: "memory");
}
#elif defined(__aarch64__)
#define ULY_FLUSH (UINT64_C(1) << 24) // FZ of FPCR
static inline uint64_t uly_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static inline void uly_set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
#define ULY_FLUSH UINT64_C(0)
static inline uint64_t uly_mode(void) { return 0; }
static inline void uly_set_mode(__attribute__((unused)) uint64_t mode) {}
#endif

// uly_job is a run in progress. Each worker takes the task number `next` and increments it, until
// it reaches `tasks`.
typedef struct {
  uly_kernel kernel;
  const void *args;
  char *scratch; // workers x ULY_SCRATCH_BYTES
  int64_t tasks;
  int32_t flush; // treat denormals as zero
  _Alignas(64) int64_t next;
} uly_job;

// uly_work runs tasks on the calling thread until none is left.
static inline void uly_work(uly_job *j, int64_t worker) {
  // The mode belongs to the thread, which Go and the host program also use: it is restored.
  const uint64_t was = uly_mode();
  if (j->flush) uly_set_mode(was | ULY_FLUSH);
  for (;;) {
    int64_t task = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
    if (task >= j->tasks) break;
    j->kernel(j->args, task, worker, j->scratch + worker * (int64_t)ULY_SCRATCH_BYTES);
  }
  uly_set_mode(was);
}
