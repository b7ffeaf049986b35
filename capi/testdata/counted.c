// counted.c CALLS: ranks over MPI make this number of calls. This program replaces C's allocator
// and counts the library's allocations. The caller counts Go's garbage collections between the
// lines "begin" and "end" on stderr.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include "host.h"

static uintptr_t lo, hi; // the addresses of the library
static long allocations;
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);
#define COUNT()                                              \
  do {                                                       \
    uintptr_t from = (uintptr_t)__builtin_return_address(0); \
    allocations += from >= lo && from < hi;                  \
  } while (0)
void *malloc(size_t n) {
  COUNT();
  return __libc_malloc(n);
}
void *calloc(size_t n, size_t m) {
  COUNT();
  return __libc_calloc(n, m);
}
void *realloc(void *p, size_t n) {
  COUNT();
  return __libc_realloc(p, n);
}
void *aligned_alloc(size_t a, size_t n) {
  COUNT();
  return __libc_memalign(a, n);
}
int posix_memalign(void **p, size_t a, size_t n) {
  COUNT();
  return !(*p = __libc_memalign(a, n));
}

int main(int argc, char **argv) {
  int rank, size, calls = argc > 1 ? atoi(argv[1]) : 1000;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  // The addresses of the library in /proc/self/maps.
  Dl_info at;
  CHECK(dladdr((void *)(uintptr_t)ulysses_version, &at));
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[4096];
  while (maps && fgets(line, sizeof line, maps)) {
    unsigned long a, b;
    if (strstr(line, "libulysses.so") && sscanf(line, "%lx-%lx", &a, &b) == 2)
      lo = lo ? lo : a, hi = b;
  }
  CHECK(maps && lo && (uintptr_t)at.dli_fbase == lo);
  fclose(maps);
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = 1;
  ulysses_context *c;
  OK(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), &o, &c));
  CHECK(allocations > 0); // creating a context allocates, so the counter works
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.flags = ULYSSES_CAUSAL, d.heads = H, d.head_dim = D, bd.batch = 1,
  bd.seq = S;
  ulysses_plan *plan;
  ulysses_batch *batch;
  ulysses_batch_info info;
  ulysses_sizes need;
  ULYSSES_INIT(&info);
  ULYSSES_INIT(&need);
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(ulysses_plan_sizes(plan, batch, &need));
  int64_t shape[4] = {1, info.rows, H, D};
  ulysses_tensor t[8];
  for (int i = 0; i < 8; i++) {
    float *x = allocate((uint64_t)(info.rows * H * D) * 4);
    t[i] = floats(x, shape);
    for (int64_t k = 0; k < info.rows * H * D; k++) x[k] = number(i, k);
  }
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a);
  ULYSSES_INIT(&g);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3], a.saved = allocate(need.saved),
  a.saved_bytes = need.saved;
  g.dout = &t[4], g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  long before = 0;
  for (int i = 0; i < calls + 100; i++) {
    if (i == 100) {
      before = allocations;
      if (rank == 0) fputs("begin\n", stderr);
    }
    double sum = 1;
    int64_t count = 1;
    OK(ulysses_attention_forward(plan, batch, &a));
    OK(ulysses_attention_backward(plan, batch, &a, &g));
    OK(ulysses_loss_reduce(c, &sum, &count, NULL));
    CHECK(count == size);
  }
  if (rank == 0) fputs("end\n", stderr);
  CHECK(allocations == before);
  ulysses_context_destroy(c);
  MPI_Finalize();
  if (rank == 0) printf("ok counted %d\n", size);
  return 0;
}
