/* Ways to move an all-to-all between MPI processes of one node, in turn in one run, so that their
 * times can be compared. Each prints one line for each size: the bytes of a rank's send buffer, the
 * least and the median time of the slowest rank, and the ratio of MPI_Alltoall's time to it.
 *
 *   MPI_Alltoall      private buffers
 *   messages          private buffers; MPI_Irecv and MPI_Isend for each pair, as in package comm
 *   shared source     the send buffers are in a shared window, and each receiver copies out of
 *                     them: one copy. It needs all tensors of a communicator in such a window
 *   shared slots      private buffers; each pair has four slots of 64 KiB in a window: two copies
 *   process_vm_readv  private buffers; each receiver reads the sender's memory: one copy by the
 *                     kernel
 *
 *   mpicc -O2 alltoall_shared.c -o alltoall_shared && mpirun -n 2 ./alltoall_shared */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { RANKS = 8, WAYS = 5, SLOT = 64 << 10, SLOTS = 4, SPINS = 200, MOST = 200 };
static const char *names[WAYS] = {"MPI_Alltoall", "messages", "shared source", "shared slots", "process_vm_readv"};

typedef struct {
  _Alignas(64) _Atomic long n;
} counter;

/* The shared memory that orders the ranks. Counters only grow. */
typedef struct {
  counter started[RANKS], done[RANKS];
  counter filled[RANKS][RANKS], emptied[RANKS][RANKS]; /* slots, by sender and receiver */
  struct {
    long pid;
    const char *send;
  } process[RANKS];
  _Alignas(64) char slot[RANKS][RANKS][SLOTS][SLOT];
} board;

static int rank, size;
static board *shared;
static char *sources[RANKS]; /* the send buffers of all ranks in the window */
static long turn;

static void wait_until(counter *c, long n) {
  for (int i = 0; atomic_load_explicit(&c->n, memory_order_acquire) < n; i++)
    if (i > SPINS) sched_yield();
}

static void store(counter *c, long n) { atomic_store_explicit(&c->n, n, memory_order_release); }

/* Each receiver reads from the senders, by memcpy or by the kernel. */
static void one_copy(const char *send, char *recv, long block, int by_kernel) {
  turn++;
  store(&shared->started[rank], turn);
  memcpy(recv + rank * block, send + rank * block, block);
  for (int k = 1; k < size; k++) {
    int j = (rank - k + size) % size;
    wait_until(&shared->started[j], turn);
    if (!by_kernel) {
      memcpy(recv + j * block, sources[j] + rank * block, block);
      continue;
    }
    struct iovec to = {recv + j * block, block}, from = {(char *)shared->process[j].send + rank * block, block};
    if (process_vm_readv(shared->process[j].pid, &to, 1, &from, 1, 0) != block) {
      perror("alltoall_shared: process_vm_readv");
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  store(&shared->done[rank], turn);
  for (int k = 1; k < size; k++) wait_until(&shared->done[(rank + k) % size], turn);
}

/* Moves the chunks of all blocks through slots, in whatever order slots are free or filled. */
static void two_copies(const char *send, char *recv, long block) {
  static long sent[RANKS], received[RANKS]; /* chunks since the start, by rank */
  long chunks = (block + SLOT - 1) / SLOT, out[RANKS] = {0}, in[RANKS] = {0};
  memcpy(recv + rank * block, send + rank * block, block);
  for (long left = 2 * chunks * (size - 1); left > 0;) {
    long before = left;
    for (int k = 1; k < size; k++) {
      int to = (rank + k) % size, from = (rank - k + size) % size;
      counter *filled = &shared->filled[rank][to], *emptied = &shared->emptied[rank][to];
      for (; out[to] < chunks && sent[to] - atomic_load_explicit(&emptied->n, memory_order_acquire) < SLOTS; left--) {
        long at = out[to]++ * SLOT, n = block - at < SLOT ? block - at : SLOT;
        memcpy(shared->slot[rank][to][sent[to] % SLOTS], send + to * block + at, n);
        store(filled, ++sent[to]);
      }
      filled = &shared->filled[from][rank], emptied = &shared->emptied[from][rank];
      for (; in[from] < chunks && atomic_load_explicit(&filled->n, memory_order_acquire) > received[from]; left--) {
        long at = in[from]++ * SLOT, n = block - at < SLOT ? block - at : SLOT;
        memcpy(recv + from * block + at, shared->slot[from][rank][received[from] % SLOTS], n);
        store(emptied, ++received[from]);
      }
    }
    if (left == before) sched_yield();
  }
}

static void messages(const char *send, char *recv, long block) {
  MPI_Request requests[2 * RANKS];
  int n = 0;
  for (int k = 1; k < size; k++) {
    int j = (rank - k + size) % size;
    MPI_Irecv(recv + j * block, block, MPI_BYTE, j, 1, MPI_COMM_WORLD, &requests[n++]);
  }
  for (int k = 1; k < size; k++) {
    int j = (rank + k) % size;
    MPI_Isend(send + j * block, block, MPI_BYTE, j, 1, MPI_COMM_WORLD, &requests[n++]);
  }
  memcpy(recv + rank * block, send + rank * block, block);
  MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
}

static void move(int way, const char *send, const char *source, char *recv, long block) {
  switch (way) {
    case 0: MPI_Alltoall(send, block, MPI_BYTE, recv, block, MPI_BYTE, MPI_COMM_WORLD); break;
    case 1: messages(send, recv, block); break;
    case 2: one_copy(source, recv, block, 0); break;
    case 3: two_copies(send, recv, block); break;
    case 4: one_copy(send, recv, block, 1); break;
  }
}

/* The byte that a rank sends at an offset. */
static char value(int from, long at) { return (char)(at * 31 + from * 7 + at / 4093); }

static void check(int way, const char *recv, long block) {
  for (int j = 0; j < size; j++)
    for (long i = 0; i < block; i++)
      if (recv[j * block + i] != value(j, rank * block + i)) {
        fprintf(stderr, "alltoall_shared: rank %d: %s: wrong data from rank %d\n", rank, names[way], j);
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void measure(long bytes, char *send, char *source, char *recv) {
  static double seconds[WAYS][MOST], slowest[WAYS][MOST];
  long block = bytes / size;
  int repeat = bytes <= 1 << 20 ? MOST : bytes <= 4 << 20 ? 100 : 30;
  for (long i = 0; i < bytes; i++) send[i] = source[i] = value(rank, i);
  for (int round = -2; round < repeat; round++)
    for (int way = 0; way < WAYS; way++) {
      if (round == -1) memset(recv, 0, bytes);
      MPI_Barrier(MPI_COMM_WORLD);
      double began = MPI_Wtime();
      move(way, send, source, recv, block);
      if (round >= 0) seconds[way][round] = MPI_Wtime() - began;
      if (round == -1) check(way, recv, block);
    }
  for (int way = 0; way < WAYS; way++)
    MPI_Reduce(seconds[way], slowest[way], repeat, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank > 0) return;
  for (int way = 0; way < WAYS; way++) qsort(slowest[way], repeat, sizeof(double), by_value);
  for (int way = 0; way < WAYS; way++)
    printf("|%d|%ld|%s|%.1f|%.1f|%.2f|%.2f|\n", size, bytes, names[way], 1e6 * slowest[way][0],
           1e6 * slowest[way][repeat / 2], slowest[0][0] / slowest[way][0],
           slowest[0][repeat / 2] / slowest[way][repeat / 2]);
  fflush(stdout);
}

int main(int argc, char **argv) {
  const long most = 64L << 20;
  MPI_Win board_window, window;
  MPI_Aint bytes;
  int unit;
  char *source;
  void *own;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size > RANKS) {
    fprintf(stderr, "alltoall_shared: %d ranks; start at most %d\n", size, RANKS);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Win_allocate_shared(rank == 0 ? sizeof(board) : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &own, &board_window);
  MPI_Win_shared_query(board_window, 0, &bytes, &unit, &shared);
  MPI_Win_allocate_shared(most, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &source, &window);
  for (int j = 0; j < size; j++) MPI_Win_shared_query(window, j, &bytes, &unit, &sources[j]);
  char *send = malloc(most), *recv = malloc(most);
  if (send == NULL || recv == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
  shared->process[rank].pid = getpid(), shared->process[rank].send = send;
  if (rank == 0)
    printf("|ranks|bytes|way|least us|median us|ratio of least|ratio of median|\n|---|---|---|---|---|---|---|\n");
  for (long n = 256L << 10; n <= most; n *= 4) measure(n, send, source, recv);
  free(send), free(recv);
  MPI_Win_free(&window);
  MPI_Win_free(&board_window);
  MPI_Finalize();
  return 0;
}
