#define _GNU_SOURCE
#include "bridge.h"

#include <dlfcn.h>
#include <stdio.h>

const uly_cuda_api *plug_load(const char *path, char *text, int64_t text_bytes, uint32_t *have) {
  *have = 0;
  text[0] = 0;
  // The file is never closed: a library with threads of its own cannot be unloaded.
  void *file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!file) {
    snprintf(text, text_bytes, "%s", dlerror());
    return 0;
  }
  const uly_cuda_api *(*plugin)(uint32_t, uint32_t *);
  *(void **)&plugin = dlsym(file, "uly_cuda_plugin");
  if (!plugin) return 0;
  const uly_cuda_api *table = plugin(ULY_CUDA_ABI, have);
  if (table && (table->abi != ULY_CUDA_ABI || table->size != sizeof *table)) {
    *have = table->abi;
    snprintf(text, text_bytes, "its table has %u bytes, not %u", table->size, (unsigned)sizeof *table);
    return 0;
  }
  if (table && table->operations != ULY_OPERATIONS_SUM) {
    *have = table->abi;
    snprintf(text, text_bytes, "its operations, or their arguments, differ");
    return 0;
  }
  return table;
}
