// The MPI calls that comm/mpi*.go makes: thin, without state, errors as MPI's codes. Bytes and offsets are int64; what goes beyond
// an int is cut into pieces here or refused by the caller.
#ifndef ULYSSES_MPI_CALLS_H
#define ULYSSES_MPI_CALLS_H

#include <mpi.h>
#include <stdint.h>

#define UMPI_SHORT (-1) // a message was shorter than its receiver expects

// Messages of one exchange under way; grown as needed, freed by umpi_pending_free.
typedef struct {
	MPI_Request *requests; // receives first
	MPI_Status *statuses;
	int *expected; // bytes, of the receives
	int count, receives, capacity;
} umpi_pending;

#pragma GCC visibility push(hidden)
MPI_Comm umpi_world(void);
int umpi_state(int *initialized, int *finalized, int *level);
int umpi_multiple(void); // the thread level MPI_THREAD_MULTIPLE
int umpi_return_errors(MPI_Comm c);
int umpi_dup(MPI_Comm c, MPI_Comm *out);
int umpi_split(MPI_Comm c, int color, int key, MPI_Comm *out, int *none); // a negative color takes part and gets none
int umpi_identify(MPI_Comm c, int *rank, int *size);
int umpi_free(MPI_Comm *c);
int umpi_abort(int code); // the whole job; does not return
int64_t umpi_fortran(MPI_Comm c);
void umpi_error_text(int code, char *text, int size);
void umpi_library(char *text, int size);

int umpi_barrier(MPI_Comm c);
int umpi_broadcast(MPI_Comm c, void *data, int bytes, int root);
int umpi_allgather(MPI_Comm c, const void *send, int bytes, void *recv);
int umpi_allgatherv(MPI_Comm c, void *all, const int *counts, const int *offsets); // every rank's own block is in place
int umpi_alltoall(MPI_Comm c, const void *send, void *recv, int bytes);

// Posts receives and sends of any size, to all other ranks at once; the rank's own block is copied. No message is longer
// than piece. The sequence number of the call keeps messages of calls that do not fit each other apart.
int umpi_exchange_start(MPI_Comm c, int rank, int size, const char *send, const int64_t *soffsets, const int64_t *sbytes,
	char *recv, const int64_t *roffsets, const int64_t *rbytes, int64_t sequence, int64_t piece, umpi_pending *p);
int umpi_wait(umpi_pending *p); // UMPI_SHORT when a message was shorter than its receiver expected
int umpi_test(umpi_pending *p, int *done);
umpi_pending *umpi_pending_new(void);
void umpi_pending_free(umpi_pending *p);
int umpi_sendrecv(MPI_Comm c, char *recv, int64_t rbytes, int from, const char *send, int64_t sbytes, int to, int64_t piece, umpi_pending *p);
#pragma GCC visibility pop

#endif
