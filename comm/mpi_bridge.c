#define _GNU_SOURCE
#include "mpi_bridge.h"

#include <dlfcn.h>
#include <stdio.h>

const umpi_api *umpi;
void (*umpi_before)(void *state), (*umpi_after)(const void *state);

void umpi_use(const umpi_api *table) { umpi = table; }

int umpi_open(const char *path, char *text, int size, uint32_t *have) {
  *have = 0;
  text[0] = 0;
  void *file = dlopen(path, RTLD_NOW | RTLD_LOCAL); // never closed: MPI cannot be unloaded
  if (file == NULL) {
    snprintf(text, size, "%s", dlerror());
    return 0;
  }
  const umpi_api *(*find)(uint32_t, uint32_t *);
  *(void **)&find = dlsym(file, "umpi_table");
  if (find == NULL) return 0;
  const umpi_api *table = find(UMPI_ABI, have);
  if (table == NULL) return 0;
  if (table->abi != UMPI_ABI || table->size != sizeof *table) {
    *have = table->abi;
    snprintf(text, size, "a table of %u bytes, not %u", table->size, (unsigned)sizeof *table);
    return 0;
  }
  umpi = table;
  return 1;
}

const char *umpi_headers(void) { return umpi->headers; }

int umpi_loaded_library(const char *path, char *text, int size) {
  // MPI_MAX_LIBRARY_VERSION_STRING is at most 8192 in all libraries. The caller holds a lock.
  static char full[8192];
  int n = 0;
  void *from = RTLD_DEFAULT;
  if (path != NULL && (from = dlopen(path, RTLD_NOW | RTLD_NOLOAD)) == NULL) return 0;
  int (*version)(char *, int *);
  *(void **)&version = dlsym(from, "MPI_Get_library_version");
  if (version == NULL || version(full, &n) != 0 || n <= 0 || n >= (int)sizeof full) return 0;
  full[n] = 0;
  snprintf(text, size, "%s", full);
  return 1;
}
