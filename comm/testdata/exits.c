// A host program without MPI of its own: it opens the table, and ends by exit(argv[2]) on rank 1
// while the others wait, or with 0 on all.
#include "../mpi_table.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  uint32_t have;
  umpi_comm c;
  int rank, size;
  void *file = argc > 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (file == NULL) return puts("usage: exits FILE CODE"), 90;
  const umpi_api *(*find)(uint32_t, uint32_t *);
  *(void **)&find = dlsym(file, "umpi_table");
  const umpi_api *mpi = find(UMPI_ABI, &have);
  if (mpi->start(3) || mpi->world(&c) || mpi->identify(c, &rank, &size) || mpi->barrier(c)) return 91;
  int code = atoi(argv[2]);
  if (code == 0 || rank == 1) exit(code); // with the communicator open
  return mpi->barrier(c) ? 92 : 93;
}
