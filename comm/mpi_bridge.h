// Calls through the table, and how the table is found (mpi_opened.go, mpi_linked.go).
#ifndef ULYSSES_MPI_BRIDGE_H
#define ULYSSES_MPI_BRIDGE_H

#include <stddef.h>

#include "mpi_table.h"

#pragma GCC visibility push(hidden)
extern const umpi_api *umpi; // NULL until MPI is needed; then for good

// Functions that a library calls around each call of MPI, so that the host's signals need not wait
// for other ranks. NULL = none. The caller owns *room.
typedef struct {
  char bytes[128];
} umpi_room __attribute__((aligned(16)));
extern void (*umpi_before)(void *room), (*umpi_after)(const void *room);

#define UMPI_CALL(name, parameters, arguments)   \
  static inline int umpi_##name parameters {     \
    umpi_room room;                              \
    if (umpi_before != NULL) umpi_before(&room); \
    int outcome = umpi->name arguments;          \
    if (umpi_after != NULL) umpi_after(&room);   \
    return outcome;                              \
  }
UMPI_CALLS(UMPI_CALL)
#undef UMPI_CALL

void umpi_use(const umpi_api *table);
// Opens a file that has the table and uses it; else text says why, and have is its version, 0 for a
// file without a table.
int umpi_open(const char *path, char *text, int size, uint32_t *have);
// The text by which the MPI library of this process names itself: of one that is visible to all
// when path is NULL, else of that file, which is mapped already. Returns whether there is one.
int umpi_present(const char *path, char *text, int size);
// The file that this code lies in: the program or the library.
int umpi_here(char *text, int size);
#pragma GCC visibility pop

#endif
