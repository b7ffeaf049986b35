// opaque.c: streams and user pointers are small numbers, such as cudaStreamPerThread, which is 2.
// The library passes them on and never reads them. The stacks of goroutines grow in the first calls
// of a thread and shrink in garbage collections (GOGC=1), and the Go runtime then checks pointers.
#include <pthread.h>
#include "host.h"

#define NUMBER(n) ((void *)(uintptr_t)(n))
enum { THREADS = 8, CALLS = 200 };

static ulysses_status copies(void *user, const ulysses_local_call *a) {
  CHECK(user == NUMBER(3) && a->stream == NUMBER(2));
  size_t n = (size_t)(a->q->shape[0] * a->q->shape[1] * a->q->shape[2] * a->q->shape[3]) * 4;
  if (!a->backward) memcpy(a->out->data, a->v->data, n);
  else memcpy(a->dv->data, a->dout->data, n), memset(a->dq->data, 0, n), memset(a->dk->data, 0, n);
  return ULYSSES_OK;
}

static void logged(void *user, int32_t level, const char *line) {
  CHECK(user == NUMBER(5) && level == 0 && line[0] == '{');
}

static int32_t allgather(void *user, const void *in, void *out, int64_t bytes) {
  CHECK(user == NUMBER(7));
  memcpy(out, in, (size_t)bytes);
  return 0;
}

static void *calls(void *unused) {
  ulysses_host_comm h;
  ulysses_options o;
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ulysses_context *c;
  ulysses_plan *plan;
  ulysses_batch *batch;
  ULYSSES_INIT(&h);
  ULYSSES_INIT(&o);
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  h.size = 1, h.user = NUMBER(7), h.allgather = allgather;
  o.threads = 1, o.log = logged, o.log_user = NUMBER(5);
  d.dtype = ULYSSES_F32, d.heads = H, d.head_dim = D, bd.batch = 1, bd.seq = S;
  OK(ulysses_context_create_host(&h, &o, &c));
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  ulysses_sizes size;
  ULYSSES_INIT(&size);
  OK(ulysses_local_sizes(plan, batch, &size));
  int64_t shape[4] = {1, S, H, D}, last[4] = {1, 2, H, D};
  ulysses_tensor t[9];
  for (int i = 0; i < 9; i++) t[i] = floats(allocate(S * H * D * 4), i < 8 ? shape : last);
  const ulysses_tensor *in = &t[0];
  ulysses_tensor *out = &t[3];
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ulysses_reshard_args r;
  ulysses_halo_args x;
  ULYSSES_INIT(&a);
  ULYSSES_INIT(&g);
  ULYSSES_INIT(&r);
  ULYSSES_INIT(&x);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3], a.saved = allocate(size.saved),
  a.saved_bytes = size.saved, a.stream = NUMBER(2);
  g.dout = &t[4], g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  r.n = 1, r.in = &in, r.out = &out, r.stream = NUMBER(1);
  x.n = 2, x.x = &t[0], x.halo = &t[8], x.stream = NUMBER(1);
  for (int i = 0; i < CALLS; i++) {
    ulysses_request *q;
    OK(ulysses_local_forward(plan, batch, &a, copies, NUMBER(3)));
    OK(ulysses_local_backward(plan, batch, &a, &g, copies, NUMBER(3)));
    OK(ulysses_seq_to_heads_start(plan, batch, &r, &q));
    OK(ulysses_request_wait(q));
    OK(ulysses_halo_forward(c, batch, &x));
  }
  for (int i = 0; i < 9; i++) free(t[i].data);
  free(a.saved);
  ulysses_context_destroy(c);
  return unused;
}

int main(void) {
  pthread_t t[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&t[i], NULL, calls, NULL) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(t[i], NULL) == 0);
  return 0;
}
