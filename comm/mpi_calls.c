//go:build mpi

#include "mpi_calls.h"

#include <stdlib.h>
#include <string.h>

enum { TAG_PAIR = 1, TAG_EXCHANGE = 2, TAGS = 16384 }; // every library has tags up to 32767

#define TRY(call) do { int e_ = (call); if (e_ != MPI_SUCCESS) return e_; } while (0)

MPI_Comm umpi_world(void) { return MPI_COMM_WORLD; } // a macro over an address in one library, a number in another

int umpi_state(int *initialized, int *finalized, int *level) {
	*level = 0;
	TRY(MPI_Initialized(initialized));
	TRY(MPI_Finalized(finalized));
	return *initialized && !*finalized ? MPI_Query_thread(level) : MPI_SUCCESS;
}

int umpi_multiple(void) { return MPI_THREAD_MULTIPLE; }

int umpi_return_errors(MPI_Comm c) { return MPI_Comm_set_errhandler(c, MPI_ERRORS_RETURN); }

int umpi_dup(MPI_Comm c, MPI_Comm *out) {
	TRY(MPI_Comm_dup(c, out));
	return umpi_return_errors(*out);
}

int umpi_split(MPI_Comm c, int color, int key, MPI_Comm *out, int *none) {
	TRY(MPI_Comm_split(c, color < 0 ? MPI_UNDEFINED : color, key, out));
	*none = *out == MPI_COMM_NULL;
	return *none ? MPI_SUCCESS : umpi_return_errors(*out);
}

int umpi_identify(MPI_Comm c, int *rank, int *size) {
	TRY(MPI_Comm_rank(c, rank));
	return MPI_Comm_size(c, size);
}

int umpi_abort(int code) { return MPI_Abort(MPI_COMM_WORLD, code); }

int umpi_free(MPI_Comm *c) { return MPI_Comm_free(c); }

int64_t umpi_fortran(MPI_Comm c) { return (int64_t)MPI_Comm_c2f(c); }

void umpi_error_text(int code, char *text, int size) {
	char full[MPI_MAX_ERROR_STRING];
	int n = 0;
	if (MPI_Error_string(code, full, &n) != MPI_SUCCESS) n = 0;
	if (n > size - 1) n = size - 1;
	memcpy(text, full, n);
	text[n] = 0;
}

void umpi_library(char *text, int size) {
	char full[MPI_MAX_LIBRARY_VERSION_STRING];
	int n = 0;
	if (MPI_Get_library_version(full, &n) != MPI_SUCCESS) n = 0;
	if (n > size - 1) n = size - 1;
	memcpy(text, full, n);
	text[n] = 0;
}

int umpi_barrier(MPI_Comm c) { return MPI_Barrier(c); }

int umpi_broadcast(MPI_Comm c, void *data, int bytes, int root) { return MPI_Bcast(data, bytes, MPI_BYTE, root, c); }

int umpi_allgather(MPI_Comm c, const void *send, int bytes, void *recv) {
	return MPI_Allgather(send, bytes, MPI_BYTE, recv, bytes, MPI_BYTE, c);
}

int umpi_allgatherv(MPI_Comm c, void *all, const int *counts, const int *offsets) {
	return MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_BYTE, all, counts, offsets, MPI_BYTE, c);
}

int umpi_alltoall(MPI_Comm c, const void *send, void *recv, int bytes) {
	return MPI_Alltoall(send, bytes, MPI_BYTE, recv, bytes, MPI_BYTE, c);
}

umpi_pending *umpi_pending_new(void) { return calloc(1, sizeof(umpi_pending)); }

void umpi_pending_free(umpi_pending *p) {
	if (p == NULL) return;
	free(p->requests);
	free(p->statuses);
	free(p->expected);
	free(p);
}

static int64_t pieces(int64_t bytes, int64_t piece) { return (bytes + piece - 1) / piece; }

static int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// empty makes room for so many messages.
static int empty(umpi_pending *p, int64_t messages) {
	p->count = p->receives = 0;
	if (messages <= p->capacity) return MPI_SUCCESS;
	if (messages > INT32_MAX / 2) return MPI_ERR_COUNT;
	size_t n = (size_t)messages;
	free(p->requests);
	free(p->statuses);
	free(p->expected);
	p->requests = malloc(n * sizeof *p->requests);
	p->statuses = malloc(n * sizeof *p->statuses);
	p->expected = malloc(n * sizeof *p->expected);
	p->capacity = p->requests && p->statuses && p->expected ? (int)n : 0;
	return p->capacity ? MPI_SUCCESS : MPI_ERR_NO_MEM;
}

// Messages between two ranks keep their order, so the pieces need no tags of their own.
static int receive(MPI_Comm c, char *data, int64_t bytes, int from, int tag, int64_t piece, umpi_pending *p) {
	for (int64_t at = 0; at < bytes; at += piece) {
		int n = smaller(piece, bytes - at);
		p->expected[p->receives++] = n;
		TRY(MPI_Irecv(data + at, n, MPI_BYTE, from, tag, c, &p->requests[p->count++]));
	}
	return MPI_SUCCESS;
}

static int send(MPI_Comm c, const char *data, int64_t bytes, int to, int tag, int64_t piece, umpi_pending *p) {
	for (int64_t at = 0; at < bytes; at += piece)
		TRY(MPI_Isend(data + at, smaller(piece, bytes - at), MPI_BYTE, to, tag, c, &p->requests[p->count++]));
	return MPI_SUCCESS;
}

// arrived looks at what has come, after all requests are done; code is the outcome of waiting.
static int arrived(umpi_pending *p, int code) {
	if (code == MPI_ERR_IN_STATUS)
		for (int i = 0; i < p->count; i++)
			if (p->statuses[i].MPI_ERROR != MPI_SUCCESS && p->statuses[i].MPI_ERROR != MPI_ERR_PENDING) return p->statuses[i].MPI_ERROR;
	TRY(code);
	for (int i = 0; i < p->receives; i++) {
		int n = 0;
		TRY(MPI_Get_count(&p->statuses[i], MPI_BYTE, &n));
		if (n != p->expected[i]) return UMPI_SHORT;
	}
	return MPI_SUCCESS;
}

int umpi_exchange_start(MPI_Comm c, int rank, int size, const char *s, const int64_t *soffsets, const int64_t *sbytes,
	char *r, const int64_t *roffsets, const int64_t *rbytes, int64_t sequence, int64_t piece, umpi_pending *p) {
	int64_t messages = 0;
	int tag = TAG_EXCHANGE + (int)(sequence % TAGS);
	for (int j = 0; j < size; j++) messages += pieces(sbytes[j], piece) + pieces(rbytes[j], piece);
	TRY(empty(p, messages));
	for (int k = 1; k < size; k++) {
		int j = (rank - k + size) % size;
		TRY(receive(c, r + roffsets[j], rbytes[j], j, tag, piece, p));
	}
	for (int k = 1; k < size; k++) { // everyone starts with another neighbour
		int j = (rank + k) % size;
		TRY(send(c, s + soffsets[j], sbytes[j], j, tag, piece, p));
	}
	if (sbytes[rank] > 0 && s + soffsets[rank] != r + roffsets[rank]) memcpy(r + roffsets[rank], s + soffsets[rank], sbytes[rank]);
	return MPI_SUCCESS;
}

int umpi_wait(umpi_pending *p) { return arrived(p, MPI_Waitall(p->count, p->requests, p->statuses)); }

int umpi_test(umpi_pending *p, int *done) {
	if (p->count == 0) { // done before, and its requests are gone
		*done = 1;
		return MPI_SUCCESS;
	}
	int code = MPI_Testall(p->count, p->requests, done, p->statuses);
	if (code == MPI_SUCCESS && !*done) return MPI_SUCCESS;
	code = arrived(p, code);
	p->count = p->receives = 0;
	return code;
}

int umpi_sendrecv(MPI_Comm c, char *recv, int64_t rbytes, int from, const char *data, int64_t sbytes, int to, int64_t piece, umpi_pending *p) {
	if (from < 0) rbytes = 0;
	if (to < 0) sbytes = 0;
	TRY(empty(p, pieces(rbytes, piece) + pieces(sbytes, piece)));
	TRY(receive(c, recv, rbytes, from, TAG_PAIR, piece, p));
	TRY(send(c, data, sbytes, to, TAG_PAIR, piece, p));
	return umpi_wait(p);
}
