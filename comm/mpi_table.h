// The MPI calls of this package as a table of functions, so that the program need not be linked
// with MPI. mpi_calls.c implements the table. It is compiled into the program, or once for each MPI
// library into libulysses_mpi_*.so, which a program without MPI opens (mpi_bridge.c). This header
// does not depend on an MPI library.
#ifndef ULYSSES_MPI_TABLE_H
#define ULYSSES_MPI_TABLE_H

#include <stdint.h>

#define UMPI_ABI 5u

// Results in addition to MPI's error codes, which are positive.
#define UMPI_ENDED (-2)  // MPI has been finalized
#define UMPI_THREAD (-3) // the thread level forbids calls on this thread
#define UMPI_NULL (-4)   // no such communicator
#define UMPI_INTER (-5)  // an intercommunicator
// UMPI_LENGTH - r: the message of rank r has another length than its receiver expects.
#define UMPI_LENGTH (-1000)

// The limit in bytes of a block that needs no message to announce it.
#define UMPI_SMALL 4096

// An MPI_Comm, which is a pointer in Open MPI and an int in MPICH.
typedef int64_t umpi_comm;
// The messages of one all-to-all or send-receive in progress. It grows as needed.
typedef struct umpi_pending umpi_pending;

// X(name, parameters, arguments). All functions return MPI_SUCCESS (0), an error code of MPI, or
// one of the results above. Bytes and offsets are int64_t. Blocks that do not fit an int are split
// into several messages where a limit is given; elsewhere the caller passes an int.
//
//   state           thread level: 0 single, 1 funneled, 2 serialized, 3 multiple. Before
//                   start and after end, only state and library may be called
//   device_memory   *yes = 1 if MPI accepts pointers to CUDA memory
//   start           requests a thread level; MPI then ends when the process exits with 0
//   end             ends MPI if start has started it
//   abort           ends the whole job; it returns only if MPI has ended
//   world, from     duplicate a communicator; the original keeps its error handler
//   split           a rank with a negative color gets *none = 1
//   allgatherv      in place: every rank has its own block in all
//   alltoall_start  posts receives and sends of any size to all other ranks and copies the
//                   rank's own block. No message is longer than limit. The sequence number
//                   keeps the messages of different all-to-alls apart
//   wait, sendrecv  *waited = seconds until every rank from which this rank receives had started
//                   the call. A block of more than UMPI_SMALL bytes follows an empty message, whose
//                   arrival is that of its sender; a smaller block is such a message itself
#define UMPI_CALLS(X)                                                                                               \
  X(state, (int *initialized, int *finalized, int *level), (initialized, finalized, level))                         \
  X(library, (char *text, int size), (text, size))                                                                  \
  X(device_memory, (int *yes), (yes))                                                                               \
  X(start, (int level), (level))                                                                                    \
  X(end, (void), ())                                                                                                \
  X(error_text, (int code, char *text, int size), (code, text, size))                                               \
  X(abort, (int code), (code))                                                                                      \
  X(world, (umpi_comm * out), (out))                                                                                \
  X(from, (int32_t fortran, umpi_comm *out), (fortran, out))                                                        \
  X(fortran, (umpi_comm c, int32_t *out), (c, out))                                                                 \
  X(identify, (umpi_comm c, int *rank, int *size), (c, rank, size))                                                 \
  X(split, (umpi_comm c, int color, int key, umpi_comm *out, int *none), (c, color, key, out, none))                \
  X(release, (umpi_comm c), (c))                                                                                    \
  X(barrier, (umpi_comm c), (c))                                                                                    \
  X(broadcast, (umpi_comm c, void *data, int bytes, int root), (c, data, bytes, root))                              \
  X(allgather, (umpi_comm c, const void *send, int bytes, void *recv), (c, send, bytes, recv))                      \
  X(allgatherv, (umpi_comm c, void *all, const int *counts, const int *offsets), (c, all, counts, offsets))         \
  X(alltoall_start,                                                                                                 \
    (umpi_comm c, int rank, int size, const char *send, const int64_t *soffsets, const int64_t *sbytes, char *recv, \
     const int64_t *roffsets, const int64_t *rbytes, int64_t sequence, int64_t limit, umpi_pending *p),             \
    (c, rank, size, send, soffsets, sbytes, recv, roffsets, rbytes, sequence, limit, p))                            \
  X(wait, (umpi_pending * p, double *waited), (p, waited))                                                          \
  X(test, (umpi_pending * p, int *done), (p, done))                                                                 \
  X(sendrecv,                                                                                                       \
    (umpi_comm c, char *recv, int64_t rbytes, int from, const char *data, int64_t sbytes, int to, int64_t limit,    \
     umpi_pending *p, double *waited),                                                                              \
    (c, recv, rbytes, from, data, sbytes, to, limit, p, waited))                                                    \
  X(pending_new, (umpi_pending * *out), (out))                                                                      \
  X(pending_free, (umpi_pending * p), (p))

typedef struct {
  uint32_t abi, size; // UMPI_ABI and sizeof(umpi_api) of the compiler that built the table
  // The MPI library whose mpi.h was compiled: "Open MPI", or "MPICH" for the libraries that share
  // MPICH's handles and constants, or "" for others. Another library may answer the calls at run
  // time.
  const char *headers;
#define UMPI_MEMBER(name, parameters, arguments) int(*name) parameters;
  UMPI_CALLS(UMPI_MEMBER)
#undef UMPI_MEMBER
} umpi_api;

// umpi_table is the only exported symbol. It returns the table, or NULL if want is not the version
// of this file. *have is that version.
const umpi_api *umpi_table(uint32_t want, uint32_t *have);

#endif
