// The MPI calls of this package as a table, so that MPI need not be linked: mpi_calls.c is compiled
// into the program, and on its own, once for each MPI library, into libulysses_mpi_*.so, which a
// library without MPI opens (mpi_bridge.c). Nothing here is of one MPI library.
#ifndef ULYSSES_MPI_TABLE_H
#define ULYSSES_MPI_TABLE_H

#include <stdint.h>

#define UMPI_ABI 1u

// Outcomes beside MPI's own codes, which are positive.
#define UMPI_SHORT (-1)  // a message was shorter than its receiver expects
#define UMPI_ENDED (-2)  // MPI has been finalised
#define UMPI_THREAD (-3) // another thread than MPI's, at a thread level that forbids it
#define UMPI_NULL (-4)   // no such communicator
#define UMPI_INTER (-5)  // an intercommunicator

// a communicator of the library, which is an address in one and a number in another
typedef int64_t umpi_comm;
typedef struct umpi_pending umpi_pending; // messages of one exchange under way; grown as needed

// X(name, parameters, arguments). All return an outcome, MPI's codes of errors among them. Bytes
// and offsets are int64; what goes beyond an int is cut into pieces there or refused by the caller.
#define UMPI_CALLS(X)                                                                                                                      \
  /* thread level: 0 single, 1 funneled, 2 serialized, 3 multiple; of the calls before start and after end only these two are allowed */   \
  X(state, (int *initialized, int *finalized, int *level), (initialized, finalized, level))                                                \
  X(library, (char *text, int size), (text, size))                                                                                         \
  X(device_memory, (int *yes), (yes)) /* whether messages may lie in memory of a CUDA GPU */                                               \
  X(start, (int level), (level))      /* asks for a level, and ends MPI when the process exits with 0 */                                   \
  X(end, (void), ())                  /* if start started it */                                                                            \
  X(error_text, (int code, char *text, int size), (code, text, size))                                                                      \
  X(abort, (int code), (code)) /* the whole job; does not return, unless MPI has ended */                                                  \
                                                                                                                                           \
  X(world, (umpi_comm * out), (out)) /* a duplicate of MPI_COMM_WORLD, as it is */                                                         \
  X(from, (int32_t fortran, umpi_comm *out),                                                                                               \
    (fortran, out)) /* a duplicate; errors of the original stay as fatal as they are */                                                    \
  X(fortran, (umpi_comm c, int32_t *out), (c, out))                                                                                        \
  X(identify, (umpi_comm c, int *rank, int *size), (c, rank, size))                                                                        \
  X(split, (umpi_comm c, int color, int key, umpi_comm *out, int *none),                                                                   \
    (c, color, key, out, none)) /* a negative color takes part and gets none */                                                            \
  X(release, (umpi_comm c), (c))                                                                                                           \
                                                                                                                                           \
  X(barrier, (umpi_comm c), (c))                                                                                                           \
  X(broadcast, (umpi_comm c, void *data, int bytes, int root), (c, data, bytes, root))                                                     \
  X(allgather, (umpi_comm c, const void *send, int bytes, void *recv), (c, send, bytes, recv))                                             \
  /* every rank's own block is in place */                                                                                                 \
  X(allgatherv, (umpi_comm c, void *all, const int *counts, const int *offsets), (c, all, counts, offsets))                                \
  X(alltoall, (umpi_comm c, const void *send, void *recv, int bytes), (c, send, recv, bytes))                                              \
  /* Posts receives and sends of any size, to all other ranks at once; the rank's own block is copied. No message is longer than piece. */ \
  /* The sequence number of the call keeps messages of calls that do not fit each other apart. */                                          \
  X(exchange_start,                                                                                                                        \
    (umpi_comm c, int rank, int size, const char *send, const int64_t *soffsets, const int64_t *sbytes, char *recv,                        \
     const int64_t *roffsets, const int64_t *rbytes, int64_t sequence, int64_t piece, umpi_pending *p),                                    \
    (c, rank, size, send, soffsets, sbytes, recv, roffsets, rbytes, sequence, piece, p))                                                   \
  X(wait, (umpi_pending * p), (p))                                                                                                         \
  X(test, (umpi_pending * p, int *done), (p, done))                                                                                        \
  X(sendrecv,                                                                                                                              \
    (umpi_comm c, char *recv, int64_t rbytes, int from, const char *data, int64_t sbytes, int to, int64_t piece,                           \
     umpi_pending *p),                                                                                                                     \
    (c, recv, rbytes, from, data, sbytes, to, piece, p))                                                                                   \
  X(pending_new, (umpi_pending * *out), (out))                                                                                             \
  X(pending_free, (umpi_pending * p), (p))

typedef struct {
  uint32_t abi, size; // UMPI_ABI and the bytes of this struct: both must be the reader's
#define UMPI_MEMBER(name, parameters, arguments) int(*name) parameters;
  UMPI_CALLS(UMPI_MEMBER)
#undef UMPI_MEMBER
} umpi_api;

// umpi_table is the one symbol: the table, or NULL for a reader of another version; have is the
// version that is here.
const umpi_api *umpi_table(uint32_t want, uint32_t *have);

#endif
