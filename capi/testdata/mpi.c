// A host in C with its own MPI: contexts on MPI_COMM_WORLD and on a proper subset, two contexts at
// the same time, contexts on the host's collectives, and ranks that disagree.
#define _GNU_SOURCE // MAP_ANONYMOUS
#include <pthread.h>
#include <sys/mman.h>
#include "collectives.h"

// disagree: an invalid argument of one rank is an error on all ranks, and the context still works.
static void disagree(ulysses_context *c, int rank, int size) {
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ulysses_plan *plan = NULL;
  ulysses_batch *batch = NULL;
  if (size == 1) return;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.heads = H, d.head_dim = rank == size - 1 ? D + 1 : D;
  IS(ulysses_attention_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(!plan && strstr(ulysses_last_error(), "dim") &&
        strstr(ulysses_last_error(), "ulysses_attention_plan"));
  IS(ulysses_attention_plan(c, rank ? &d : NULL, &plan), ULYSSES_INVALID_ARGUMENT);
  d.head_dim = D, d.dropout = rank ? 0 : 0.1f;
  IS(ulysses_attention_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(!plan && strstr(ulysses_last_error(), "dropout"));
  d.dropout = 0, d.flags = rank ? 0 : ULYSSES_CROSS;
  IS(ulysses_attention_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(!plan && strstr(ulysses_last_error(), "CROSS"));
  d.flags = 0, d.max_tokens = rank ? 0 : S;
  IS(ulysses_attention_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(!plan && strstr(ulysses_last_error(), "max_tokens"));
  bd.batch = 1, bd.seq = rank ? S : S + 1;
  IS(ulysses_batch_create(c, &bd, &batch), ULYSSES_INVALID_ARGUMENT);
  bd.seq = S;
  IS(ulysses_batch_create(c, rank ? NULL : &bd, &batch), ULYSSES_INVALID_ARGUMENT);
  bd.kv_seq = 5, bd.kv_rows = rank ? 0 : 5; // a rank has fewer than five keys
  IS(ulysses_batch_create(c, &bd, &batch), ULYSSES_INVALID_ARGUMENT);
  CHECK(!batch && strstr(ulysses_last_error(), "kv_rows"));
  int64_t keys[2] = {0, S};
  // documents of keys without lengths of keys
  bd.kv_seq = bd.kv_rows = 0, bd.docs = 1, bd.cu_seqlens = bd.kv_cu_seqlens = keys;
  IS(ulysses_batch_create(c, &bd, &batch), ULYSSES_INVALID_ARGUMENT);
  CHECK(!batch && strstr(ulysses_last_error(), "kv_cu_seqlens"));
  bd.kv_cu_seqlens = NULL;
  int64_t cu[3] = {0, rank ? 4 : 5, S};
  bd.docs = 2, bd.cu_seqlens = cu;
  IS(ulysses_batch_create(c, &bd, &batch), ULYSSES_INVALID_ARGUMENT);
}

// rows_of returns the rows of a rank, and first_of its first token. beside returns the token at
// index i of a rank's halo; -1 = zero, because it is in another document or beyond the sequence.
static int64_t rows_of(int rank) { return rank == 0 ? 3 : rank == 1 ? 0 : rank; }
static int64_t first_of(int rank) {
  return rank < 2 ? rank * 3 : 3 + (int64_t)rank * (rank - 1) / 2 - 1;
}
static int64_t beside(int rank, int after, int i, int64_t total) {
  int64_t first = first_of(rank), mine = rows_of(rank), near = after ? first + mine - 1 : first,
          t = after ? first + mine + i : first - 2 + i;
  return mine && t >= 0 && t < total && t / 4 == near / 4 ? t : -1;
}
// slope returns the gradient of an element of a halo.
static float slope(int rank, int after, int b, int i) {
  return (float)(1 + rank + 10 * i + 100 * after + 1000 * b);
}

// rows: ranks with different numbers of rows and their own positions; halos; the reduced loss.
static void rows(ulysses_context *c, int rank, int size) {
  ulysses_batch_desc bd;
  ulysses_batch *batch;
  ulysses_batch_info info;
  ULYSSES_INIT(&bd);
  ULYSSES_INIT(&info);
  int64_t mine = rows_of(rank), first = first_of(rank), total = 3;
  for (int r = 2; r < size; r++) total += r;
  int64_t positions[2 * 64], got[2 * 64];
  for (int b = 0; b < 2; b++)
    // documents of four tokens, which ranks divide
    for (int64_t i = 0; i < mine; i++) positions[b * mine + i] = (first + i) % 4;
  bd.batch = 2, bd.rows = mine, bd.positions = positions;
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  CHECK(info.rows == mine && info.seq == total && info.docs == 2 * ((total + 3) / 4) &&
        info.max_rows == (size > 3 ? 3 : 3));
  OK(ulysses_batch_positions(batch, got));
  CHECK(mine == 0 || memcmp(positions, got, (size_t)(2 * mine) * 8) == 0);

  // The two rows before and after this rank's, and their gradients.
  float x[2 * 8], halo[2 * 2], dx[2 * 8];
  int64_t xs[3] = {2, mine, 1}, hs[3] = {2, 2, 1};
  ulysses_tensor tx = ulysses_tensor_of(x, 1, 0, ULYSSES_F32, 3, xs, NULL),
                 th = ulysses_tensor_of(halo, 1, 0, ULYSSES_F32, 3, hs, NULL);
  ulysses_tensor tdx = ulysses_tensor_of(dx, 1, 0, ULYSSES_F32, 3, xs, NULL);
  for (int b = 0; b < 2; b++)
    for (int64_t i = 0; i < mine; i++)
      x[b * mine + i] = (float)(100 * (b + 1) + first + i), dx[b * mine + i] = 0;
  for (int after = 0; after < 2; after++) {
    ulysses_halo_args a;
    ULYSSES_INIT(&a);
    a.n = after ? -2 : 2, a.x = &tx, a.halo = &th;
    OK(ulysses_halo_workspace(c, batch, &a, &a.workspace_bytes));
    a.workspace = a.workspace_bytes ? allocate(a.workspace_bytes) : NULL;
    OK(ulysses_halo_forward(c, batch, &a));
    for (int b = 0; b < 2; b++)
      for (int i = 0; i < 2; i++) {
        int64_t t = beside(rank, after, i, total);
        CHECK(halo[b * 2 + i] == (t >= 0 ? (float)(100 * (b + 1) + t) : 0));
        halo[b * 2 + i] = slope(rank, after, b, i);
      }
    a.x = &tdx;
    OK(ulysses_halo_backward(c, batch, &a));
    free(a.workspace);
  }
  for (int b = 0; b < 2; b++) // a row's gradient is the sum over the halos that it was in
    for (int64_t i = 0; i < mine; i++) {
      float want = 0;
      for (int r = 0; r < size; r++)
        for (int k = 0; k < 4; k++)
          if (beside(r, k / 2, k % 2, total) == first + i) want += slope(r, k / 2, b, k % 2);
      CHECK(dx[b * mine + i] == want);
    }
  int64_t n = rank == 0 ? 0 : 5 * rank, valid = n;
  double loss = 0.25 * (double)n, mean;
  OK(ulysses_loss_reduce(c, &loss, &valid, &mean));
  CHECK(valid == 5 * size * (size - 1) / 2 && mean == (size > 1 ? 0.25 : 0));
  ulysses_batch_destroy(batch);
}

// A plan of attention and a batch, with what the library says about them.
typedef struct {
  ulysses_plan *plan;
  ulysses_batch *batch;
  ulysses_batch_info info;
  ulysses_sizes size;
} planned;

static planned plan(ulysses_context *c, int64_t batch, int64_t seq, int64_t heads, int64_t dim) {
  planned p;
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  ULYSSES_INIT(&p.info);
  ULYSSES_INIT(&p.size);
  d.dtype = ULYSSES_F32, d.heads = heads, d.head_dim = dim, bd.batch = batch, bd.seq = seq;
  OK(ulysses_attention_plan(c, &d, &p.plan));
  OK(ulysses_batch_create(c, &bd, &p.batch));
  OK(ulysses_batch_query(p.batch, &p.info));
  OK(ulysses_plan_sizes(p.plan, p.batch, &p.size));
  return p;
}

// started: two reshards in progress at the same time return the tokens of this rank's heads.
static void started(ulysses_context *c) {
  const planned p = plan(c, B, S, H, D);
  const ulysses_batch_info info = p.info;
  const ulysses_sizes size = p.size;
  int64_t h = size.head_hi - size.head_lo, rs[4] = {B, info.rows, H, D}, hs[4] = {B, S, h, D};
  ulysses_request *q[2];
  float *x[2], *y[2], *z[2];
  void *ws[2];
  ulysses_tensor tx[2], ty[2], tz[2];
  ulysses_reshard_args a;
  for (int i = 0; i < 2; i++) {
    x[i] = allocate((uint64_t)(B * info.rows * H * D) * 4),
    y[i] = allocate((uint64_t)(B * S * h * D) * 4),
    z[i] = allocate((uint64_t)(B * info.rows * H * D) * 4);
    fill(i, x[i], info.lo[0], info.hi[0]);
    tx[i] = floats(x[i], rs), ty[i] = floats(y[i], hs), tz[i] = floats(z[i], rs);
    const ulysses_tensor *in[1] = {&tx[i]};
    ulysses_tensor *out[1] = {&ty[i]};
    ULYSSES_INIT(&a);
    a.n = 1, a.in = in, a.out = out;
    OK(ulysses_reshard_workspace(p.plan, p.batch, &a, 1, &a.workspace_bytes));
    ws[i] = a.workspace = a.workspace_bytes ? allocate(a.workspace_bytes) : NULL;
    OK(ulysses_seq_to_heads_start(p.plan, p.batch, &a, &q[i]));
  }
  for (int i = 0; i < 2; i++) {
    OK(ulysses_request_wait(q[i]));
    IS(ulysses_request_wait(q[i]), ULYSSES_INVALID_ARGUMENT);
    for (int64_t b = 0; b < B; b++)
      for (int64_t s = 0; s < S; s++)
        for (int64_t k = 0; k < h * D; k++)
          CHECK(y[i][(b * S + s) * h * D + k] ==
                number(i, ((b * S + s) * H + size.head_lo) * D + k));
    const ulysses_tensor *in[1] = {&ty[i]};
    ulysses_tensor *out[1] = {&tz[i]};
    a.in = in, a.out = out, a.workspace = ws[i];
    OK(ulysses_heads_to_seq(p.plan, p.batch, &a));
    CHECK(memcmp(x[i], z[i], (size_t)(B * info.rows * H * D) * 4) == 0);
    free(x[i]), free(y[i]), free(z[i]), free(ws[i]);
  }
  ulysses_plan_destroy(p.plan), ulysses_batch_destroy(p.batch);
}

// abandoned: a context may be destroyed while a reshard (pass 0) or a pass (pass 1) is in progress.
// The host may then free its memory: later calls of MPI do not access it.
static void abandoned(const ulysses_options *o, int pass) {
  enum { BYTES = 8 << 20 };
  ulysses_context *c;
  OK(ulysses_context_create_mpi(-1, o, &c));
  const planned p = plan(c, 1, 4096, 8, 64);
  int64_t rs[4] = {1, p.info.rows, 8, 64}, hs[4] = {1, 4096, p.size.head_hi - p.size.head_lo, 64};
  void *m[5];
  ulysses_tensor t[5];
  for (int i = 0; i < 5; i++) {
    m[i] = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m[i] != MAP_FAILED);
    t[i] = floats(m[i], i == 4 ? hs : rs);
  }
  if (pass) {
    ulysses_attention_args a;
    ulysses_pass *x;
    ULYSSES_INIT(&a);
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3];
    OK(ulysses_attention_forward_start(p.plan, p.batch, &a, &x));
    OK(ulysses_pass_send(x, ULYSSES_TENSOR_Q));
  } else {
    const ulysses_tensor *in[1] = {&t[0]};
    ulysses_tensor *out[1] = {&t[4]};
    ulysses_reshard_args a;
    ulysses_request *x;
    ULYSSES_INIT(&a);
    a.n = 1, a.in = in, a.out = out;
    OK(ulysses_seq_to_heads_start(p.plan, p.batch, &a, &x));
  }
  ulysses_context_destroy(c);
  CHECK(!ulysses_last_error()[0]);
  for (int i = 0; i < 5; i++) munmap(m[i], BYTES);
  for (int i = 0; i < 10; i++) MPI_Barrier(MPI_COMM_WORLD);
}

static void *destroy(void *context) {
  ulysses_context_destroy(context);
  CHECK(strstr(ulysses_last_error(), "ulysses_context_destroy: ") &&
        strstr(ulysses_last_error(), "call from that thread"));
  return NULL;
}

// wrong_thread: MPI_Init allows calls of MPI on this thread alone. Another thread cannot destroy a
// context, which stays valid, with its plans.
static void wrong_thread(const ulysses_options *o) {
  int level;
  pthread_t other;
  ulysses_context *c;
  MPI_Query_thread(&level);
  if (level >= MPI_THREAD_SERIALIZED) return;
  OK(ulysses_context_create_mpi(-1, o, &c));
  const planned p = plan(c, 1, S, H, D);
  CHECK(pthread_create(&other, NULL, destroy, c) == 0 && pthread_join(other, NULL) == 0);
  results r = attention(c, 1);
  free_results(r);
  CHECK(p.info.rows >= 0);
  ulysses_plan_destroy(p.plan), ulysses_batch_destroy(p.batch);
  CHECK(!ulysses_last_error()[0]);
  ulysses_context_destroy(c);
  CHECK(!ulysses_last_error()[0]);
  ulysses_context_destroy(c);
  CHECK(strstr(ulysses_last_error(), "it was destroyed"));
}

int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = 1;
  ulysses_context *alone, *world, *part = NULL, *own;
  OK(ulysses_context_create_local(&o, &alone));
  results whole = attention(alone, 1);
  OK(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), &o, &world));
  o.ulysses = size + 1;
  IS(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), &o, &own), ULYSSES_INVALID_ARGUMENT);
  o.ulysses = rank ? 0 : size;
  if (size > 1)
    IS(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), &o, &own),
       ULYSSES_INVALID_ARGUMENT);
  o.ulysses = 0;

  // A proper subset: all ranks except the last, in reverse order.
  MPI_Comm sub;
  MPI_Comm_split(MPI_COMM_WORLD, rank == size - 1 && size > 1 ? MPI_UNDEFINED : 0, -rank, &sub);
  if (sub != MPI_COMM_NULL) OK(ulysses_context_create_mpi(MPI_Comm_c2f(sub), &o, &part));
  collectives u = {MPI_COMM_WORLD, 0, 0};
  ulysses_host_comm h = host_comm(&u);
  OK(ulysses_context_create_host(&h, &o, &own));

  ulysses_context *contexts[3] = {world, own, part};
  for (int i = 0; i < 3; i++)
    if (contexts[i]) {
      results r = attention(contexts[i], 1);
      same(r, whole);
      free_results(r);
    }
  CHECK(u.calls > 0 || size == 1); // one rank alone makes no collective call
  for (int i = 1; i < 4 && size > 1; i++) {
    collectives bad = {MPI_COMM_WORLD, 0, i};
    ulysses_context *none = NULL;
    h.user = &bad;
    IS(ulysses_context_create_host(&h, &o, &none), ULYSSES_COMM);
    CHECK(!none && strstr(ulysses_last_error(), "77"));
  }
  if (size > 1) { // two ranks with one number, and a rank without alltoallv
    ulysses_context *none = NULL;
    collectives good = {MPI_COMM_WORLD, 0, 0};
    h.user = &good, h.rank = rank == size - 1 ? 0 : rank;
    IS(ulysses_context_create_host(&h, &o, &none), ULYSSES_INVALID_ARGUMENT);
    CHECK(!none && strstr(ulysses_last_error(), "rank 0's block"));
    h.rank = rank, h.alltoallv = rank ? alltoallv : NULL;
    IS(ulysses_context_create_host(&h, &o, &none), ULYSSES_INVALID_ARGUMENT);
    CHECK(!none && strstr(ulysses_last_error(), "alltoallv"));
  }
  disagree(world, rank, size), disagree(own, rank, size);
  started(world), started(own);
  rows(world, rank, size), rows(own, rank, size);
  results r = attention(world, 2); // after the errors
  same(r, whole);
  free_results(r), free_results(whole);
  abandoned(&o, 0), abandoned(&o, 1);
  wrong_thread(&o);

  ulysses_context_destroy(part), ulysses_context_destroy(own), ulysses_context_destroy(world),
      ulysses_context_destroy(alone);
  if (sub != MPI_COMM_NULL) MPI_Comm_free(&sub);
  int flag;
  MPI_Finalized(&flag);
  CHECK(!flag); // the host finalizes MPI
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  if (rank == 0) printf("ok mpi %d\n", size);
  return 0;
}
