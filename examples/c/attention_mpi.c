/* Causal attention over a sequence that is sharded over the ranks of your own MPI program.
 *
 *   mpicc attention_mpi.c -lulysses -lm && mpirun -n 4 ./a.out
 *   mpirun -n 4 ./a.out 3            on a communicator of the first three ranks
 *
 * Each rank holds SEQ/ranks tokens of all heads, and gets the output and the gradients of these
 * tokens. The program compares them with the results of one rank alone: they are bitwise equal. */
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include "ulysses.h"

enum { SEQ = 100, HEADS = 8, DIM = 16 };

static void check(ulysses_status s) {
  if (s != ULYSSES_OK) {
    fprintf(stderr, "%s: %s\n", ulysses_status_string(s), ulysses_last_error());
    MPI_Abort(MPI_COMM_WORLD, s);
  }
}

static void *memory(uint64_t bytes) { return aligned_alloc(64, (bytes + 127) / 64 * 64); }

/* attend returns out and dq [hi - lo, HEADS, DIM] of this rank's tokens [lo, hi), which the caller
 * frees. */
static void attend(ulysses_context *context, int64_t *lo, int64_t *hi, float **out, float **dq) {
  ulysses_attention_desc desc;
  ULYSSES_INIT(&desc);
  desc.dtype = ULYSSES_F32;
  desc.flags = ULYSSES_CAUSAL;
  desc.heads = HEADS;
  desc.head_dim = DIM;
  ulysses_plan *plan;
  check(ulysses_attention_plan(context, &desc, &plan)); /* once for each kind of layer */

  ulysses_batch_desc lengths;
  ULYSSES_INIT(&lengths);
  lengths.batch = 1;
  lengths.seq = SEQ;
  ulysses_batch *batch;
  check(ulysses_batch_create(context, &lengths, &batch)); /* once for each set of lengths */
  ulysses_batch_info info;
  ULYSSES_INIT(&info);
  check(ulysses_batch_query(batch, &info));
  *lo = info.lo[0], *hi = info.hi[0];

  ulysses_sizes sizes;
  ULYSSES_INIT(&sizes);
  check(ulysses_plan_sizes(plan, batch, &sizes));

  int64_t shape[4] = {1, info.rows, HEADS, DIM}, n = info.rows * HEADS * DIM;
  float *x[8];
  ulysses_tensor t[8]; /* q k v dout | out dq dk dv */
  for (int i = 0; i < 8; i++) {
    x[i] = memory((uint64_t)n * sizeof(float));
    t[i] = ulysses_tensor_of(x[i], ULYSSES_CPU, 0, ULYSSES_F32, 4, shape, NULL);
    for (int64_t j = 0; i < 4 && j < n; j++)
      x[i][j] = (float)((7 * i + 13 * (*lo * HEADS * DIM + j)) % 101) / 101 - 0.5f;
  }
  ulysses_attention_args args;
  ULYSSES_INIT(&args);
  args.q = &t[0], args.k = &t[1], args.v = &t[2], args.out = &t[4];
  args.saved = memory(sizes.saved), args.saved_bytes = sizes.saved;
  check(ulysses_attention_forward(plan, batch, &args));

  ulysses_attention_grads grads;
  ULYSSES_INIT(&grads);
  grads.dout = &t[3], grads.dq = &t[5], grads.dk = &t[6], grads.dv = &t[7];
  check(ulysses_attention_backward(plan, batch, &args, &grads));

  *out = x[4], *dq = x[5];
  for (int i = 0; i < 8; i++)
    if (i != 4 && i != 5) free(x[i]);
  free(args.saved);
  ulysses_batch_destroy(batch);
  ulysses_plan_destroy(plan);
}

int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int used = argc < 2 ? INT_MAX : atoi(argv[1]);
  if (used < 1) {
    if (rank == 0) fprintf(stderr, "usage: %s [N]    N: use the first N ranks, 1 or more\n", argv[0]);
    MPI_Finalize();
    return 1;
  }
  MPI_Comm group; /* your communicator, of any ranks */
  MPI_Comm_split(MPI_COMM_WORLD, rank < used ? 0 : MPI_UNDEFINED, rank, &group);
  if (group == MPI_COMM_NULL) {
    MPI_Finalize();
    return 0;
  }
  MPI_Comm_size(group, &size);

  ulysses_context *ranks, *alone;
  check(ulysses_context_create_mpi(MPI_Comm_c2f(group), NULL, &ranks));
  check(ulysses_context_create_local(NULL, &alone));
  int64_t lo, hi, first, end;
  float *out, *dq, *whole, *whole_dq;
  attend(ranks, &lo, &hi, &out, &dq);
  attend(alone, &first, &end, &whole, &whole_dq);

  size_t bytes = (size_t)(hi - lo) * HEADS * DIM * sizeof(float);
  int differ = memcmp(out, whole + lo * HEADS * DIM, bytes) || memcmp(dq, whole_dq + lo * HEADS * DIM, bytes), any;
  MPI_Allreduce(&differ, &any, 1, MPI_INT, MPI_MAX, group);
  if (rank == 0)
    printf("%d ranks, %d tokens: out and dq are %s the results of one rank\n", size, SEQ, any ? "NOT" : "equal to");
  free(out), free(dq), free(whole), free(whole_dq);
  ulysses_context_destroy(ranks);
  ulysses_context_destroy(alone);
  MPI_Comm_free(&group);
  MPI_Finalize();
  return any;
}
