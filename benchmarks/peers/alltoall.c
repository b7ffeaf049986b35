/* MPI_Alltoall, the peer of our all-to-all. Prints one JSON line for each size. `bytes` is the size
 * of the send buffer of a rank, including the block for itself. The time of a repetition is the
 * time of the slowest rank, from a barrier to the return of MPI_Alltoall.
 *
 *   mpicc -O2 alltoall.c -o alltoall && mpirun -n 2 ./alltoall [repetitions [bytes ...]] */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Measures one size, and checks the received data. Returns 1 on an error. Collective. */
static int measure(long bytes, int repeat, int rank, int size) {
  int block = (int)(bytes / size);
  char *send = malloc((size_t)block * size), *recv = malloc((size_t)block * size);
  double *seconds = malloc(sizeof(double) * repeat), *slowest = malloc(sizeof(double) * repeat);
  if (!send || !recv || !seconds || !slowest) {
    fprintf(stderr, "alltoall: rank %d: two buffers of %ld bytes: out of memory\n", rank, bytes);
    return 1;
  }
  memset(send, rank + 1, (size_t)block * size);
  memset(recv, 0, (size_t)block * size);
  const int warm = 3;
  for (int i = -warm; i < repeat; i++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double t = MPI_Wtime();
    MPI_Alltoall(send, block, MPI_BYTE, recv, block, MPI_BYTE, MPI_COMM_WORLD);
    if (i >= 0) seconds[i] = MPI_Wtime() - t;
  }
  for (int r = 0; r < size; r++)
    if (recv[(size_t)r * block] != r + 1 || recv[(size_t)r * block + block - 1] != r + 1) {
      fprintf(stderr, "alltoall: rank %d: wrong data from rank %d at %ld bytes\n", rank, r, bytes);
      return 1;
    }
  MPI_Reduce(seconds, slowest, repeat, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    qsort(slowest, repeat, sizeof(double), by_value);
    double median = repeat % 2 ? slowest[repeat / 2] : (slowest[repeat / 2 - 1] + slowest[repeat / 2]) / 2;
    printf(
        "{\"peer\": \"MPI_Alltoall\", \"case\": \"%ld\", \"bytes\": %ld, \"ranks\": %d, \"repeat\": %d, \"min_s\": "
        "%.9f, "
        "\"median_s\": %.9f, \"gb_per_s\": %.3f}\n",
        bytes, (long)block * size, size, repeat, slowest[0], median, (double)block * size / slowest[0] / 1e9);
    fflush(stdout);
  }
  free(send), free(recv), free(seconds), free(slowest);
  return 0;
}

int main(int argc, char **argv) {
  static const long sizes[] = {64L << 10, 256L << 10, 1L << 20, 4L << 20, 16L << 20, 64L << 20};
  int rank, size, failed = 0, repeat = argc > 1 ? atoi(argv[1]) : 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int n = argc > 2 ? argc - 2 : (int)(sizeof sizes / sizeof *sizes);
  for (int i = 0; i < n && !failed; i++) {
    long bytes = argc > 2 ? atol(argv[i + 2]) : sizes[i];
    int repetitions = repeat > 0 ? repeat : bytes <= (1 << 20) ? 200 : bytes <= (4 << 20) ? 50 : 15;
    failed = measure(bytes, repetitions, rank, size);
  }
  if (failed) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Finalize();
  return 0;
}
