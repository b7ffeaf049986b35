// open_ranks initializes MPI and creates two contexts with one CPU thread: one of this rank alone,
// and one of all ranks.
#pragma once
#include <mpi.h>
#include "host.h"

static inline void open_ranks(int *argc, char ***argv, int *rank, int *size,
                              ulysses_context **alone, ulysses_context **all) {
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, size);
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = 1;
  OK(ulysses_context_create_local(&o, alone));
  OK(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), &o, all));
}
