// Helpers of gpu.c. The CUDA runtime of the host is opened at run time: ULYSSES_TEST_CUDART names
// the file, a libcudart or the emulated plug-in, which has the same functions. Without a GPU the
// program exits with 77.
#pragma once
#include <dlfcn.h>
#include <pthread.h>
#include "host.h"

enum { TO_GPU = 1, TO_HOST = 2, NOT_READY = 600, NON_BLOCKING = 1 };
typedef void *stream_t;

static struct {
  int (*get_device)(int *), (*set_device)(int);
  int (*malloc)(void **, size_t), (*free)(void *);
  int (*malloc_host)(void **, size_t);
  int (*copy)(void *, const void *, size_t, int, stream_t);
  int (*set)(void *, int, size_t, stream_t);
  int (*stream)(stream_t *, unsigned), (*destroy)(stream_t), (*wait)(stream_t), (*query)(stream_t);
  int emulated, gpu;
} cuda;

#define RUN(x)                                                                         \
  do {                                                                                 \
    int run_code = (x);                                                                \
    if (run_code) {                                                                    \
      fprintf(stderr, "%s:%d: %s: CUDA error %d\n", __FILE__, __LINE__, #x, run_code); \
      fflush(NULL), _exit(9);                                                          \
    }                                                                                  \
  } while (0)

static inline void find_cuda(void) {
  const char *names[] = {getenv("ULYSSES_TEST_CUDART"), "libcudart.so.13", "libcudart.so.12", NULL};
  void *file = NULL;
  for (int i = 0; i < 3 && !file; i++)
    if (names[i]) file = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  if (!file) printf("SKIPPED: no CUDA runtime: set ULYSSES_TEST_CUDART to a libcudart\n"), exit(77);
  struct {
    const char *name;
    void *at;
  } all[] = {{"cudaGetDevice", &cuda.get_device},   {"cudaSetDevice", &cuda.set_device},
             {"cudaMalloc", &cuda.malloc},          {"cudaFree", &cuda.free},
             {"cudaMallocHost", &cuda.malloc_host}, {"cudaMemcpyAsync", &cuda.copy},
             {"cudaMemsetAsync", &cuda.set},        {"cudaStreamCreateWithFlags", &cuda.stream},
             {"cudaStreamDestroy", &cuda.destroy},  {"cudaStreamSynchronize", &cuda.wait},
             {"cudaStreamQuery", &cuda.query}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    CHECK((*(void **)all[i].at = dlsym(file, all[i].name)) != NULL);
  cuda.emulated = dlsym(file, "uly_cuda_plugin") != NULL;
  if (cuda.set_device(0)) printf("SKIPPED: no GPU\n"), exit(77);
}

static inline void *device_allocate(uint64_t bytes) {
  void *p = NULL;
  RUN(cuda.malloc(&p, bytes ? bytes : 256));
  return p;
}

// to_gpu copies n floats to new memory of the GPU, in the order of the stream.
static inline float *to_gpu(const float *host, int64_t n, stream_t s) {
  float *p = device_allocate((uint64_t)n * 4);
  if (n) RUN(cuda.copy(p, host, (size_t)n * 4, TO_GPU, s));
  return p;
}

// blank returns new memory of the GPU, filled with 0xff bytes (NaN).
static inline float *blank(int64_t n, stream_t s) {
  float *p = device_allocate((uint64_t)n * 4);
  if (n) RUN(cuda.set(p, 0xff, (size_t)n * 4, s));
  return p;
}

// fetch copies n floats from the GPU, and waits for the stream.
static inline float *fetch(const float *p, int64_t n, stream_t s) {
  float *host = allocate((uint64_t)n * 4);
  if (n) RUN(cuda.copy(host, p, (size_t)n * 4, TO_HOST, s));
  RUN(cuda.wait(s));
  return host;
}

static inline ulysses_tensor on_gpu(float *data, int64_t *shape) {
  return ulysses_tensor_of(data, ULYSSES_CUDA, cuda.gpu, ULYSSES_F32, 4, shape, NULL);
}

// keep_busy enqueues work on a GPU's stream that takes a while. The emulated GPU runs nothing
// before the host waits for it, so there it does nothing.
static inline void *keep_busy(stream_t s) {
  if (cuda.emulated) return NULL;
  void *p = device_allocate((uint64_t)1 << 30);
  for (int i = 0; i < 100; i++) RUN(cuda.set(p, i, (size_t)1 << 30, s));
  return p;
}

// Ranks that are threads check at the same time: on the emulated GPU, a rank that waits for its
// results may run what other ranks have enqueued.
static pthread_barrier_t *check_barrier;

// meet waits until all ranks are about to check. No rank waits for the GPU between meet and
// check_pending.
static inline void meet(void) {
  if (check_barrier) pthread_barrier_wait(check_barrier);
}

// check_pending checks that the calls have not waited for the GPU: the output (NULL = none) has not
// been written, or the stream is still busy.
static inline void check_pending(stream_t s, const float *out) {
  meet();
  if (cuda.emulated && out) {
    uint32_t bits;
    memcpy(&bits, out, 4); // memory of the emulated GPU is host memory
    // as blank has set it, or as it was allocated if that has not run either
    CHECK(bits == 0xffffffffu || bits == 0x7fffffffu);
  } else if (!cuda.emulated) {
    CHECK(cuda.query(s) == NOT_READY);
  }
  meet();
}

static inline ulysses_context *context_on(int32_t device, int32_t comm) {
  ulysses_context *c;
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.device = device, o.comm = comm, o.threads = device == ULYSSES_CPU,
  o.ordinal = device == ULYSSES_CUDA ? cuda.gpu : 0;
  OK(ulysses_context_create_local(&o, &c));
  return c;
}

// A plan, a batch, their sizes, and this rank's number of rows and first row.
typedef struct {
  ulysses_plan *plan;
  ulysses_batch *batch;
  ulysses_sizes size;
  int64_t n, lo;
} pair;

// pair_of creates the plan of a description and a batch [B, S].
static inline pair pair_of(ulysses_context *c, const ulysses_attention_desc *d) {
  pair p;
  ulysses_batch_desc bd;
  ulysses_batch_info info;
  ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&p.size);
  bd.batch = B, bd.seq = S;
  OK(ulysses_attention_plan(c, d, &p.plan));
  OK(ulysses_batch_create(c, &bd, &p.batch));
  OK(ulysses_batch_query(p.batch, &info));
  OK(ulysses_plan_sizes(p.plan, p.batch, &p.size));
  p.n = info.rows, p.lo = info.lo[0];
  return p;
}

static inline pair attention_with(ulysses_context *c, int32_t flags) {
  ulysses_attention_desc d;
  ULYSSES_INIT(&d);
  d.dtype = ULYSSES_F32, d.flags = ULYSSES_CAUSAL | flags, d.heads = H, d.head_dim = D;
  return pair_of(c, &d);
}

static inline pair attention_pair(ulysses_context *c) { return attention_with(c, 0); }

static inline void free_pair(pair p) {
  ulysses_plan_destroy(p.plan), ulysses_batch_destroy(p.batch);
}

// close_to checks that the difference of x and y, relative to the largest value of y, is at most
// limit. TWO_DEVICES is the tolerance between two devices: each is within 2e-5 of float64.
#define TWO_DEVICES 4e-5
static inline void close_to(const float *x, const float *y, int64_t n, double limit) {
  double most = 0;
  for (int64_t i = 0; i < n; i++) most = fmax(most, fabs((double)y[i]));
  for (int64_t i = 0; i < n; i++) CHECK(fabs((double)x[i] - (double)y[i]) <= limit * most);
  CHECK(most > 1e-3);
}
