// Inline functions umpi_NAME that call the functions of the table, and functions that load the
// table (used by mpi_opened.go and mpi_linked.go).
#ifndef ULYSSES_MPI_BRIDGE_H
#define ULYSSES_MPI_BRIDGE_H

#include <stddef.h>

#include "mpi_table.h"

#pragma GCC visibility push(hidden)
extern const umpi_api *umpi; // the table; NULL until it is loaded, then constant

// Hooks around each MPI call, NULL for none (SetMPIHooks). They let the host program handle signals
// while a call waits for other ranks. Both get a pointer to the same memory, which lives for the
// call.
typedef struct {
  char bytes[128];
} umpi_hook_state __attribute__((aligned(16)));
extern void (*umpi_before)(void *state), (*umpi_after)(const void *state);

#define UMPI_CALL(name, parameters, arguments)   \
  static inline int umpi_##name parameters {     \
    umpi_hook_state room;                        \
    if (umpi_before != NULL) umpi_before(&room); \
    int outcome = umpi->name arguments;          \
    if (umpi_after != NULL) umpi_after(&room);   \
    return outcome;                              \
  }
UMPI_CALLS(UMPI_CALL)
#undef UMPI_CALL

// Uses a table that is linked into the program.
void umpi_use(const umpi_api *table);
// Opens the shared library at path and uses its table. Returns 1 on success. Otherwise it returns 0
// and writes the reason to text (size bytes); *have is the version of the table, 0 if there is
// none.
int umpi_open(const char *path, char *text, int size, uint32_t *have);
// Returns `headers` of the table.
const char *umpi_headers(void);
// Writes the version text of an MPI library that this process has loaded: the globally visible one
// if path is NULL, else the one at path. Returns 1 if there is one, else 0.
int umpi_loaded_library(const char *path, char *text, int size);
#pragma GCC visibility pop

#endif
