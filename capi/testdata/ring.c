// A host in C with its own MPI: a ring with zigzag batches, sinks, slopes, soft caps, dropout and a
// block mask. Each rank's rows, and the sums of the gradients of sinks and slopes, are compared
// with the outcome of one rank alone.
#include "ranks.h"

enum { HQ = 4, HKV = 2, LENGTH = 26, BLOCK = 4, BLOCKS = (LENGTH + BLOCK - 1) / BLOCK };
enum { Q, K, V, DOUT, OUT, DQ, DK, DV, TENSORS };
static const int64_t heads_of[TENSORS] = {HQ, HKV, HKV, HQ, HQ, HQ, HKV, HKV};

typedef struct {
  float *x[TENSORS], dsinks[HQ], dalibi[HQ];
  ulysses_batch_info info;
} outcome;

// attend runs attention forward and backward on this rank's rows of whole tensors.
static outcome attend(ulysses_context *c, int32_t flags, int32_t zigzag) {
  outcome r = {{0}, {0}, {0}, {0}};
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ulysses_sizes size;
  ulysses_plan *plan;
  ulysses_batch *batch;
  ULYSSES_INIT(&d), ULYSSES_INIT(&bd), ULYSSES_INIT(&size), ULYSSES_INIT(&r.info);
  d.dtype = ULYSSES_F32, d.heads = HQ, d.kv_heads = HKV, d.head_dim = D, d.softcap = 2,
  d.dropout = 0.25f, d.block_q = BLOCK, d.block_k = BLOCK,
  d.flags = flags | ULYSSES_SINKS | ULYSSES_ALIBI | ULYSSES_BLOCK_MASK;
  OK(ulysses_attention_plan(c, &d, &plan));
  bd.batch = B, bd.seq = LENGTH, bd.flags = zigzag;
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &r.info));
  OK(ulysses_plan_sizes(plan, batch, &size));
  int64_t shape[TENSORS][4], vector[1] = {HQ}, mask_shape[3] = {HQ, BLOCKS, BLOCKS};
  ulysses_tensor t[TENSORS];
  for (int i = 0; i < TENSORS; i++) {
    int64_t of[4] = {B, r.info.rows, heads_of[i], D}, row = heads_of[i] * D, at = 0;
    memcpy(shape[i], of, sizeof of);
    r.x[i] = allocate((uint64_t)(B * r.info.rows * row + 1) * 4);
    for (int64_t b = 0; b < B; b++)
      for (int k = 0; k < r.info.ranges; k++)
        for (int64_t n = r.info.lo[k] * row; n < r.info.hi[k] * row; n++)
          r.x[i][at++] = number(i, b * LENGTH * row + n);
    CHECK(at == B * r.info.rows * row);
    t[i] = floats(r.x[i], shape[i]);
  }
  float sinks[HQ] = {0.5f, -1, 2, 0}, slopes[HQ] = {0.5f, 0.25f, 0.125f, 0.0625f};
  uint8_t mask[HQ * BLOCKS * BLOCKS];
  ulysses_block_pattern pattern;
  ULYSSES_INIT(&pattern);
  pattern.pattern = ULYSSES_PATTERN_BIGBIRD, pattern.per_head = 1, pattern.seed = 3;
  OK(ulysses_block_mask(&pattern, HQ, BLOCKS, mask));
  ulysses_tensor ts = ulysses_tensor_of(sinks, 1, 0, ULYSSES_F32, 1, vector, NULL),
                 ta = ulysses_tensor_of(slopes, 1, 0, ULYSSES_F32, 1, vector, NULL),
                 tds = ulysses_tensor_of(r.dsinks, 1, 0, ULYSSES_F32, 1, vector, NULL),
                 tda = ulysses_tensor_of(r.dalibi, 1, 0, ULYSSES_F32, 1, vector, NULL),
                 tm = ulysses_tensor_of(mask, 1, 0, ULYSSES_U8, 3, mask_shape, NULL);
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = &t[Q], a.k = &t[K], a.v = &t[V], a.out = &t[OUT], a.sinks = &ts, a.alibi = &ta,
  a.block_mask = &tm, a.dropout_seed = 77;
  a.saved = allocate(size.saved), a.saved_bytes = size.saved;
  g.dout = &t[DOUT], g.dq = &t[DQ], g.dk = &t[DK], g.dv = &t[DV], g.dsinks = &tds, g.dalibi = &tda;
  OK(ulysses_attention_forward(plan, batch, &a));
  OK(ulysses_attention_backward(plan, batch, &a, &g));
  free(a.saved);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return r;
}

static void near(int which, double x, double want, double most) {
  if (!(fabs(x - want) <= 2e-5 * most) || most < 1e-3) {
    fprintf(stderr, "result %d: %.9g, but %.9g on one rank (at most %.9g)\n", which, x, want, most);
    exit(9);
  }
}

// compare compares this rank's rows, and the sums of gradients over the ranks, with one rank's.
static void compare(const outcome *part, const outcome *whole) {
  for (int i = OUT; i < TENSORS; i++) {
    int64_t row = heads_of[i] * D, at = 0;
    double most = 0;
    for (int64_t n = 0; n < B * LENGTH * row; n++) most = fmax(most, fabs((double)whole->x[i][n]));
    for (int64_t b = 0; b < B; b++)
      for (int k = 0; k < part->info.ranges; k++)
        for (int64_t n = part->info.lo[k] * row; n < part->info.hi[k] * row; n++, at++)
          near(i, (double)part->x[i][at], (double)whole->x[i][b * LENGTH * row + n], most);
  }
  const float *gradients[2][2] = {{part->dsinks, whole->dsinks}, {part->dalibi, whole->dalibi}};
  for (int k = 0; k < 2; k++) {
    float sum[HQ];
    double most = 0;
    MPI_Allreduce(gradients[k][0], sum, HQ, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int h = 0; h < HQ; h++) most = fmax(most, fabs((double)gradients[k][1][h]));
    for (int h = 0; h < HQ; h++)
      near(TENSORS + k, (double)sum[h], (double)gradients[k][1][h], most);
  }
}

int main(int argc, char **argv) {
  int rank, size;
  ulysses_context *alone, *c;
  open_ranks(&argc, &argv, &rank, &size, &alone, &c);
  for (int32_t ring = 1; ring <= size; ring++) {
    if (size % ring) continue;
    ulysses_options o;
    ulysses_context *grouped;
    ulysses_context_info who;
    ULYSSES_INIT(&o), ULYSSES_INIT(&who);
    o.threads = 1, o.ring = ring;
    OK(ulysses_context_create_mpi(-1, &o, &grouped));
    OK(ulysses_context_query(grouped, &who));
    CHECK(who.ring == ring && who.ulysses == size / ring);
    for (int k = 0; k < 4; k++) {
      int32_t flags = (k & 1 ? ULYSSES_CAUSAL : 0) | (k & 2 ? ULYSSES_GATHER_KEYS : 0);
      outcome whole = attend(alone, flags, 0);
      for (int32_t zigzag = 0; zigzag <= ULYSSES_ZIGZAG; zigzag++) {
        outcome part = attend(grouped, flags, zigzag);
        CHECK(part.info.ranges <= (zigzag && ring > 1 ? 2 : 1));
        compare(&part, &whole);
        for (int i = 0; i < TENSORS; i++) free(part.x[i]);
      }
      for (int i = 0; i < TENSORS; i++) free(whole.x[i]);
    }
    ulysses_context_destroy(grouped);
  }
  ulysses_options odd;
  ulysses_context *none = NULL;
  ULYSSES_INIT(&odd);
  odd.ring = size + 1;
  CHECK(ulysses_context_create_mpi(-1, &odd, &none) == ULYSSES_INVALID_ARGUMENT && !none &&
        strstr(ulysses_last_error(), "ring"));
  ulysses_context_destroy(c), ulysses_context_destroy(alone);
  MPI_Finalize();
  if (rank == 0) printf("ok ring %d\n", size);
  return 0;
}
