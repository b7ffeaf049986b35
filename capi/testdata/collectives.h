// The collectives of a host with MPI, for ulysses_context_create_host.
#pragma once
#include <mpi.h>
#include "host.h"

// The `fail`-th allgather fails on all ranks; 0 = none fails.
typedef struct {
  MPI_Comm comm;
  int calls, fail;
} collectives;

static inline int32_t allgather(void *user, const void *in, void *out, int64_t bytes) {
  collectives *u = user;
  if (++u->calls == u->fail) return 77;
  return MPI_Allgather(in, (int)bytes, MPI_BYTE, out, (int)bytes, MPI_BYTE, u->comm);
}

static inline int32_t alltoallv(void *user, const void *in, const int64_t *in_bytes, void *out,
                                const int64_t *out_bytes) {
  collectives *u = user;
  int n, s[64], so[64], r[64], ro[64], at = 0, to = 0;
  MPI_Comm_size(u->comm, &n);
  for (int i = 0; i < n; i++) {
    s[i] = (int)in_bytes[i], so[i] = at, at += s[i];
    r[i] = (int)out_bytes[i], ro[i] = to, to += r[i];
  }
  return MPI_Alltoallv(in, s, so, MPI_BYTE, out, r, ro, MPI_BYTE, u->comm);
}

// host_comm returns the description of a host whose collectives run on u->comm.
static inline ulysses_host_comm host_comm(collectives *u) {
  ulysses_host_comm h;
  ULYSSES_INIT(&h);
  MPI_Comm_rank(u->comm, &h.rank), MPI_Comm_size(u->comm, &h.size);
  h.user = u, h.allgather = allgather, h.alltoallv = alltoallv;
  return h;
}
