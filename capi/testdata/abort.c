// abort.c WHY: a host with MPI that aborts its context with a status.
#include <mpi.h>
#include "host.h"

int main(int argc, char **argv) {
  ulysses_context *c;
  MPI_Init(&argc, &argv);
  OK(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), NULL, &c));
  ulysses_context_abort(c, atoi(argv[1]));
  return 0;
}
