// A host with MPI that changes its folder before it creates a context, as a simulation does that
// works in the folder of its run.
#define _GNU_SOURCE
#include <mpi.h>
#include <unistd.h>
#include "host.h"

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  CHECK(chdir("/") == 0);
  ulysses_context *c;
  OK(ulysses_context_create_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), NULL, &c));
  ulysses_context_destroy(c);
  MPI_Finalize();
  return puts("ok moved") < 0;
}
