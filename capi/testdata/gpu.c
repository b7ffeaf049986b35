// gpu.c MODE: a host in C with tensors on a GPU. The modes are "alone", "hostile" and "threads"
// (ranks are threads with their own collectives). With -DWITH_MPI, the program is one rank of an
// MPI job.
#ifdef WITH_MPI
#include <mpi.h>
#endif
#include "gpu.h"
#include "gpu_delta.h"
#include "gpu_moves.h"
#include "gpu_repeat.h"

enum { HIDDEN = 24 };

// Forms of gpu_attention: with memory of the context, and in overlapped passes.
enum { OWN_WORKSPACE = 1, OVERLAP = 2, FORMS = 4 };

// overlapped runs a forward and a backward pass in their overlapped form.
static void overlapped(pair p, const ulysses_attention_args *a, const ulysses_attention_grads *g) {
  ulysses_pass *pass;
  OK(ulysses_attention_forward_start(p.plan, p.batch, a, &pass));
  for (int32_t x = ULYSSES_TENSOR_Q; x <= ULYSSES_TENSOR_V; x++) OK(ulysses_pass_send(pass, x));
  OK(ulysses_pass_attend(pass));
  OK(ulysses_attention_backward_start(p.plan, p.batch, a, g, &pass));
  OK(ulysses_pass_attend(pass));
  for (int32_t x = ULYSSES_TENSOR_V; x >= ULYSSES_TENSOR_Q; x--) OK(ulysses_pass_wait(pass, x));
}

// gpu_attention is `attention` of host.h with tensors on the GPU, in the order of one stream. waits
// is 1 if the transport waits for the GPU.
static results gpu_attention(ulysses_context *c, stream_t s, int waits, int form) {
  pair p = attention_pair(c);
  int64_t n = p.n, all = B * n * H * D, shape[4] = {B, n, H, D};
  float *x[8], *host = allocate((uint64_t)all * 4);
  ulysses_tensor t[8];
  void *busy = waits ? NULL : keep_busy(s);
  for (int i = 0; i < 8; i++) {
    if (i < 4) fill(i, host, p.lo, p.lo + n);
    x[i] = i < 4 ? to_gpu(host, all, s) : blank(all, s);
    t[i] = on_gpu(x[i], shape);
  }
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[4], a.stream = s;
  a.saved = device_allocate(p.size.saved), a.saved_bytes = p.size.saved;
  if (!(form & OWN_WORKSPACE))
    a.workspace = device_allocate(p.size.workspace), a.workspace_bytes = p.size.workspace;
  g.dout = &t[3], g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  if (form & OVERLAP) {
    overlapped(p, &a, &g);
  } else {
    OK(ulysses_attention_forward(p.plan, p.batch, &a));
    OK(ulysses_attention_backward(p.plan, p.batch, &a, &g));
  }
  if (!waits) check_pending(s, x[7]);
  // What the caller enqueues now runs after the calls: overwriting the inputs does not change the
  // results.
  for (int i = 0; i < 4; i++) RUN(cuda.set(x[i], 0xff, (size_t)all * 4, s));
  results r = {p.lo,
               p.lo + n,
               fetch(x[4], all, s),
               fetch(x[5], all, s),
               fetch(x[6], all, s),
               fetch(x[7], all, s)};
  OK(ulysses_context_async_error(c));
  for (int i = 0; i < 8; i++) RUN(cuda.free(x[i]));
  RUN(cuda.free(a.saved));
  if (a.workspace) RUN(cuda.free(a.workspace));
  if (busy) RUN(cuda.free(busy));
  free(host);
  free_pair(p);
  return r;
}

static inline void near_the_cpu(results x, results y) {
  const float *p[4] = {x.out, x.dq, x.dk, x.dv}, *w[4] = {y.out, y.dq, y.dk, y.dv};
  for (int i = 0; i < 4; i++) close_to(p[i], w[i], B * S * H * D, TWO_DEVICES);
}

// layer runs a whole layer forward and backward, on the CPU or in the order of a stream. It returns
// y and dx [B, n, HIDDEN], and the gradient of wq.
typedef struct {
  float *y, *dx, *dwq;
  int64_t n, lo;
} layered;

static layered layer(ulysses_context *c, int gpu, stream_t s, int32_t flags) {
  pair p = attention_with(c, flags);
  int64_t n = p.n, sizes[8] = {B * n * HIDDEN, H * D * HIDDEN, H * D * HIDDEN, H * D * HIDDEN,
                               HIDDEN * H * D, B * n * HIDDEN, B * n * HIDDEN, B * n * HIDDEN};
  int64_t rows[3] = {B, n, HIDDEN}, in[2] = {H * D, HIDDEN}, out[2] = {HIDDEN, H * D};
  float *x[9];
  ulysses_tensor t[9];
  for (int i = 0; i < 9; i++) {
    int64_t m = i == 8 ? H * D * HIDDEN : sizes[i];
    x[i] = allocate((uint64_t)m * 4);
    int64_t *shape = i == 0 || (i > 4 && i < 8) ? rows : i == 4 ? out : in;
    for (int64_t k = 0; k < m; k++) x[i][k] = 0;
    if (i < 6 && shape != rows)
      for (int64_t k = 0; k < m; k++) x[i][k] = number(i, k);
    if (i == 0 || i == 5)
      for (int64_t b = 0; b < B; b++)
        for (int64_t k = 0; k < n * HIDDEN; k++)
          x[i][b * n * HIDDEN + k] = number(i, (b * S + p.lo) * HIDDEN + k);
    if (gpu) {
      float *host = x[i];
      x[i] = to_gpu(host, m, s);
      free(host);
    }
    t[i] = ulysses_tensor_of(x[i], gpu ? ULYSSES_CUDA : ULYSSES_CPU, 0, ULYSSES_F32,
                             shape == rows ? 3 : 2, shape, NULL);
    if (gpu) t[i].ordinal = cuda.gpu;
  }
  ulysses_attention_layer_args a;
  ulysses_attention_layer_grads g;
  ulysses_sizes size;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g), ULYSSES_INIT(&size);
  a.hidden = HIDDEN, a.x = &t[0], a.wq = &t[1], a.wk = &t[2], a.wv = &t[3], a.wo = &t[4],
  a.y = &t[6], a.stream = s;
  g.dy = &t[5], g.dx = &t[7], g.dwq = &t[8];
  OK(ulysses_attention_layer_sizes(p.plan, p.batch, &a, &size));
  a.saved_bytes = size.saved, a.workspace_bytes = size.workspace;
  a.saved = gpu ? device_allocate(size.saved) : allocate(size.saved),
  a.workspace = gpu ? device_allocate(size.workspace) : allocate(size.workspace);
  OK(ulysses_attention_layer_forward(p.plan, p.batch, &a));
  OK(ulysses_attention_layer_backward(p.plan, p.batch, &a, &g));
  layered r = {x[6], x[7], x[8], n, p.lo};
  if (gpu) {
    r.y = fetch(x[6], sizes[6], s), r.dx = fetch(x[7], sizes[7], s),
    r.dwq = fetch(x[8], H * D * HIDDEN, s);
    for (int i = 0; i < 9; i++) RUN(cuda.free(x[i]));
    RUN(cuda.free(a.saved));
    RUN(cuda.free(a.workspace));
  } else {
    for (int i = 0; i < 6; i++) free(x[i]);
    free(a.saved), free(a.workspace);
  }
  free_pair(p);
  return r;
}

// between is the host's own attention, in the order of the stream that it gets: out = v.
static ulysses_status between(void *user, const ulysses_local_call *a) {
  stream_t s = user;
  int64_t n = a->v->shape[0] * a->v->shape[1] * a->v->shape[2] * a->v->shape[3];
  CHECK(a->stream == s && a->v->device == ULYSSES_CUDA && a->v->ordinal == cuda.gpu);
  for (int64_t b = 0; b < a->v->shape[0]; b++)
    for (int64_t h = 0; h < a->v->shape[2]; h++)
      for (int64_t i = 0; i < a->v->shape[1]; i++) {
        const float *from = (const float *)a->v->data + b * a->v->strides[0] +
                            i * a->v->strides[1] + h * a->v->strides[2];
        float *to = (float *)a->out->data + b * a->out->strides[0] + i * a->out->strides[1] +
                    h * a->out->strides[2];
        RUN(cuda.copy(to, from, (size_t)a->v->shape[3] * 4, 3, s));
      }
  return n ? ULYSSES_OK : ULYSSES_INTERNAL;
}

static void called_back(ulysses_context *c, stream_t s) {
  pair p = attention_pair(c);
  int64_t all = B * p.n * H * D, shape[4] = {B, p.n, H, D};
  ulysses_tensor t[4];
  float *x[4], *host = allocate((uint64_t)all * 4);
  for (int i = 0; i < 4; i++) {
    fill(i, host, p.lo, p.lo + p.n);
    x[i] = i < 3 ? to_gpu(host, all, s) : blank(all, s);
    t[i] = on_gpu(x[i], shape);
  }
  ulysses_attention_args a;
  ulysses_sizes size;
  ULYSSES_INIT(&a), ULYSSES_INIT(&size);
  OK(ulysses_local_sizes(p.plan, p.batch, &size));
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3], a.stream = s,
  a.workspace = device_allocate(size.workspace), a.workspace_bytes = size.workspace;
  OK(ulysses_local_forward(p.plan, p.batch, &a, between, s));
  float *got = fetch(x[3], all, s);
  fill(2, host, p.lo, p.lo + p.n);
  CHECK(memcmp(got, host, (size_t)all * 4) == 0);
  for (int i = 0; i < 4; i++) RUN(cuda.free(x[i]));
  RUN(cuda.free(a.workspace));
  free(got), free(host);
  free_pair(p);
}

// everything runs all tests of a context on a GPU, and compares them with one rank.
static void everything(ulysses_context *c, stream_t s, int waits) {
  ulysses_context *alone = context_on(ULYSSES_CUDA, ULYSSES_COMM_AUTO);
  results whole = gpu_attention(alone, s, 1, 0);
  for (int form = 0; form < FORMS; form++) {
    results r = gpu_attention(c, s, waits, form);
    same(r, whole);
    free_results(r);
  }
  layered one = layer(alone, 1, s, 0);
  for (int32_t flags = 0; flags <= ULYSSES_OVERLAP; flags += ULYSSES_OVERLAP) {
    layered mine = layer(c, 1, s, flags);
    for (int64_t b = 0; b < B; b++) {
      const int64_t here = b * mine.n * HIDDEN, there = (b * S + mine.lo) * HIDDEN;
      // cuBLASLt selects kernels by the number of rows
      const double limit = cuda.emulated ? 0 : TWO_DEVICES;
      close_to(mine.y + here, one.y + there, mine.n * HIDDEN, limit);
      close_to(mine.dx + here, one.dx + there, mine.n * HIDDEN, limit);
    }
    free(mine.y), free(mine.dx), free(mine.dwq);
  }
  free(one.y), free(one.dx), free(one.dwq);
  moved(c, s, waits);
  resharded(c, s, waits);
  tiled(c, s);
  called_back(c, s);
  repeats(c, s);
  deltas(c, alone, s, waits);
  free_results(whole);
  ulysses_context_destroy(alone);
}

#ifdef WITH_MPI
int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  find_cuda();
  stream_t s;
  RUN(cuda.stream(&s, NON_BLOCKING));
  int32_t ways[2] = {ULYSSES_COMM_IPC, ULYSSES_COMM_HOST};
  for (int i = 0; i < 2; i++) {
    ulysses_context *c;
    ulysses_options o;
    ulysses_context_info info;
    ULYSSES_INIT(&o), ULYSSES_INIT(&info);
    o.device = ULYSSES_CUDA, o.comm = ways[i], o.ordinal = cuda.gpu;
    OK(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), &o, &c));
    OK(ulysses_context_query(c, &info));
    CHECK(info.device == ULYSSES_CUDA && (size == 1 || info.comm == ways[i]));
    everything(c, s, 1); // the emulated GPU waits for events of other processes in the call
    ulysses_context_destroy(c);
  }
  RUN(cuda.destroy(s));
  MPI_Finalize();
  if (rank == 0) printf("ok gpu %d\n", size);
  return 0;
}
#else

static void alone(void) {
  ulysses_context *cpu = context_on(ULYSSES_CPU, 0), *c = context_on(ULYSSES_CUDA, 0);
  ulysses_context_info info;
  ULYSSES_INIT(&info);
  OK(ulysses_context_query(c, &info));
  CHECK(info.device == ULYSSES_CUDA && info.ordinal == cuda.gpu && info.size == 1);
  results want = attention(cpu, 1);
  layered on_cpu = layer(cpu, 0, NULL, 0);
  stream_t made[2], streams[5];
  for (int i = 0; i < 2; i++) RUN(cuda.stream(&made[i], NON_BLOCKING));
  // 0, 1 and 2 are the names of default streams
  streams[0] = made[0], streams[1] = made[1], streams[2] = NULL, streams[3] = (stream_t)1,
  streams[4] = (stream_t)2;
  for (int i = 0; i < 5; i++) {
    results r = gpu_attention(c, streams[i], 0, i % FORMS);
    near_the_cpu(r, want);
    free_results(r);
  }
  layered r = layer(c, 1, made[0], ULYSSES_OVERLAP);
  close_to(r.y, on_cpu.y, B * S * HIDDEN, TWO_DEVICES),
      close_to(r.dx, on_cpu.dx, B * S * HIDDEN, TWO_DEVICES),
      close_to(r.dwq, on_cpu.dwq, H * D * HIDDEN, TWO_DEVICES);
  free(r.y), free(r.dx), free(r.dwq), free(on_cpu.y), free(on_cpu.dx), free(on_cpu.dwq);
  moved(c, made[1], 0);
  resharded(c, made[1], 0), resharded(c, NULL, 0);
  tiled(c, made[0]), tiled(c, NULL);
  called_back(c, made[1]);
  repeats(c, made[0]);
  deltas(c, c, made[1], 0), deltas(c, c, NULL, 0);
  free_results(want);
  ulysses_context_destroy(c), ulysses_context_destroy(cpu);
  for (int i = 0; i < 2; i++) RUN(cuda.destroy(made[i]));
}

// hostile: tensors whose device is not the device of their memory. The context still works.
static void hostile(void) {
  CHECK(strstr(ulysses_build_info(), "\"devices\":[\"cpu\",\"cuda\"]") &&
        strstr(ulysses_build_info(), getenv("ULYSSES_CUDA_PLUGIN")));
  ulysses_context *c = NULL, *none = NULL;
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.device = 5;
  IS(ulysses_context_create_local(&o, &none), ULYSSES_INVALID_ARGUMENT);
  o.device = ULYSSES_CUDA, o.ordinal = 4096;
  IS(ulysses_context_create_local(&o, &none), ULYSSES_INVALID_ARGUMENT);
  o.ordinal = -1;
  IS(ulysses_context_create_local(&o, &none), ULYSSES_INVALID_ARGUMENT);
  o.ordinal = cuda.gpu, o.threads = 2;
  IS(ulysses_context_create_local(&o, &none), ULYSSES_INVALID_ARGUMENT);
  o.threads = 0, o.timeout = 5;
  IS(ulysses_context_create_local(&o, &none), ULYSSES_UNSUPPORTED);
  CHECK(!none);
  c = context_on(ULYSSES_CUDA, 0);
  pair p = attention_pair(c);
  stream_t s;
  RUN(cuda.stream(&s, NON_BLOCKING));
  int64_t all = B * S * H * D, shape[4] = {B, S, H, D};
  float *x[4], *host = allocate((uint64_t)all * 4), *pinned;
  ulysses_tensor t[4], bad;
  fill(0, host, 0, S);
  RUN(cuda.malloc_host((void **)&pinned, (size_t)all * 4));
  for (int i = 0; i < 4; i++) x[i] = to_gpu(host, all, s), t[i] = on_gpu(x[i], shape);
  ulysses_attention_args a;
  ULYSSES_INIT(&a);
  a.q = &bad, a.k = &t[1], a.v = &t[2], a.out = &t[3], a.stream = s;
  struct {
    const char *says;
    int32_t device, ordinal;
    void *data;
  } wrong[] = {{"device 1", ULYSSES_CPU, 0, host},
               {"device 3", 3, 0, pinned},
               {"GPU 1", ULYSSES_CUDA, cuda.gpu + 1, x[0]},
               {"memory of the host", ULYSSES_CUDA, cuda.gpu, host},
               {"memory of the host", ULYSSES_CUDA, cuda.gpu, pinned},
               {"data is NULL", ULYSSES_CUDA, cuda.gpu, NULL},
               {"memory of the host", ULYSSES_CUDA, cuda.gpu, (void *)4096}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    bad = on_gpu(wrong[i].data, shape);
    bad.device = wrong[i].device, bad.ordinal = wrong[i].ordinal;
    IS(ulysses_attention_forward(p.plan, p.batch, &a), ULYSSES_INVALID_ARGUMENT);
    CHECK(strstr(ulysses_last_error(), wrong[i].says) || wrong[i].ordinal != cuda.gpu);
  }
  bad = t[0];
  a.workspace = allocate(p.size.workspace + 256),
  a.workspace_bytes = p.size.workspace; // host memory
  a.workspace = (void *)(((uintptr_t)a.workspace + 255) & ~(uintptr_t)255);
  IS(ulysses_attention_forward(p.plan, p.batch, &a), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "memory of the host"));
  char *ws = device_allocate(p.size.workspace + 256);
  a.workspace = ws + 64; // not a multiple of 256
  IS(ulysses_attention_forward(p.plan, p.batch, &a), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "256"));
  a.workspace = ws;
  OK(ulysses_attention_forward(p.plan, p.batch, &a));
  // If there is another GPU: a context on it refuses memory of the first GPU, and does not change
  // the current GPU of the thread.
  int now = -1;
  o.timeout = 0, o.ordinal = cuda.gpu + 1;
  if (ulysses_context_create_local(&o, &none) == ULYSSES_OK) {
    pair q = attention_pair(none);
    for (int i = 0; i < 4; i++) t[i].ordinal = cuda.gpu + 1;
    bad.ordinal = cuda.gpu + 1;
    IS(ulysses_attention_forward(q.plan, q.batch, &a), ULYSSES_INVALID_ARGUMENT);
    CHECK(strstr(ulysses_last_error(), "memory of GPU 0"));
    IS(ulysses_attention_forward(p.plan, q.batch, &a), ULYSSES_INVALID_ARGUMENT);
    RUN(cuda.get_device(&now));
    CHECK(now == 0);
    ulysses_context_destroy(none);
    printf("two GPUs\n");
  }
  RUN(cuda.get_device(&now));
  CHECK(now == 0);
  RUN(cuda.wait(s));
  OK(ulysses_context_async_error(c));
  ulysses_context_destroy(c);
  IS(ulysses_attention_forward(p.plan, p.batch, &a), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_context_async_error(c), ULYSSES_INVALID_ARGUMENT);
  RUN(cuda.destroy(s));
}

// The collectives of ranks that are threads of one process.
enum { RANKS = 4 };
static struct {
  pthread_barrier_t barrier;
  const void *in[RANKS];
  const int64_t *bytes[RANKS];
} shared_buffers;
typedef struct {
  int rank, size;
  int32_t comm;
} member;

static int32_t allgather(void *user, const void *in, void *out, int64_t bytes) {
  member *m = user;
  shared_buffers.in[m->rank] = in;
  pthread_barrier_wait(&shared_buffers.barrier);
  for (int r = 0; r < m->size; r++)
    memcpy((char *)out + r * bytes, shared_buffers.in[r], (size_t)bytes);
  pthread_barrier_wait(&shared_buffers.barrier);
  return 0;
}

static int32_t alltoallv(void *user, const void *in, const int64_t *in_bytes, void *out,
                         const int64_t *out_bytes) {
  member *m = user;
  shared_buffers.in[m->rank] = in, shared_buffers.bytes[m->rank] = in_bytes;
  pthread_barrier_wait(&shared_buffers.barrier);
  char *to = out;
  for (int r = 0; r < m->size; r++) {
    const char *from = shared_buffers.in[r];
    for (int j = 0; j < m->rank; j++) from += shared_buffers.bytes[r][j];
    memcpy(to, from, (size_t)out_bytes[r]);
    to += out_bytes[r];
  }
  pthread_barrier_wait(&shared_buffers.barrier);
  return 0;
}

static void *rank_of(void *user) {
  member *m = user;
  ulysses_context *c;
  ulysses_options o;
  ulysses_host_comm h;
  ulysses_context_info info;
  ULYSSES_INIT(&o), ULYSSES_INIT(&h), ULYSSES_INIT(&info);
  RUN(cuda.set_device(cuda.gpu));
  o.device = m->rank == 1 ? ULYSSES_CPU : ULYSSES_CUDA; // the ranks' devices differ
  h.rank = m->rank, h.size = m->size, h.user = m, h.allgather = allgather,
  h.alltoallv = m->comm == ULYSSES_COMM_HOST ? alltoallv : NULL;
  IS(ulysses_context_create_host(&h, &o, &c), ULYSSES_INVALID_ARGUMENT);
  o.device = ULYSSES_CUDA, o.ordinal = m->rank ? cuda.gpu : 4096;
  // a rank without its GPU is an error on all ranks
  IS(ulysses_context_create_host(&h, &o, &c), ULYSSES_INVALID_ARGUMENT);
  o.ordinal = cuda.gpu, o.comm = m->comm;
  OK(ulysses_context_create_host(&h, &o, &c));
  OK(ulysses_context_query(c, &info));
  // the ranks share a GPU, so AUTO does not choose NCCL
  CHECK(info.comm == (m->comm ? m->comm : ULYSSES_COMM_IPC) && info.rank == m->rank);
  stream_t s;
  RUN(cuda.stream(&s, NON_BLOCKING));
  everything(c, s, m->comm == ULYSSES_COMM_HOST);
  ulysses_context_destroy(c);
  RUN(cuda.destroy(s));
  return NULL;
}

static void threads(int size, int32_t comm) {
  pthread_t t[RANKS];
  member m[RANKS];
  static pthread_barrier_t gate;
  RUN(pthread_barrier_init(&shared_buffers.barrier, NULL, (unsigned)size));
  RUN(pthread_barrier_init(&gate, NULL, (unsigned)size));
  check_barrier = &gate;
  for (int r = 0; r < size; r++) {
    m[r] = (member){r, size, comm};
    RUN(pthread_create(&t[r], NULL, rank_of, &m[r]));
  }
  for (int r = 0; r < size; r++) RUN(pthread_join(t[r], NULL));
  RUN(pthread_barrier_destroy(&shared_buffers.barrier));
  RUN(pthread_barrier_destroy(&gate));
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "alone";
  find_cuda();
  if (!strcmp(mode, "alone")) alone();
  else if (!strcmp(mode, "hostile")) hostile();
  else
    threads(2, ULYSSES_COMM_AUTO), threads(3, ULYSSES_COMM_AUTO), threads(RANKS, ULYSSES_COMM_AUTO),
        threads(2, ULYSSES_COMM_HOST);
  printf("ok %s\n", mode);
  return 0;
}
#endif
