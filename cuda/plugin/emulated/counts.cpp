#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "counts.h"
#include "settings.h"

uint64_t uly_emulated::multiply_adds;

namespace uly_emulated {

static uint64_t bytes_read, bytes_written;

static const char *file() {
  const char *name = getenv("ULYSSES_EMULATED_LAUNCHES");
  return name && *name ? name : nullptr;
}

bool counting() { return file(); }
bool skipped() { return setting("ULYSSES_EMULATED_SKIP", 0); }

void count_access(size_t bytes, bool write) { (write ? bytes_written : bytes_read) += bytes; }

void count_launch(const Kernel &kernel, dim3 grid, dim3 block, size_t shared) {
  Dl_info library;
  FILE *f = file() ? fopen(file(), "a") : nullptr;
  if (f && dladdr(kernel.address, &library))
    fprintf(f, "%s\t%zx\t%llu\t%u\t%zu\t%llu\t%llu\t%llu\n", kernel.name,
            (size_t)((const char *)kernel.address - (const char *)library.dli_fbase),
            (unsigned long long)grid.x * grid.y * grid.z, block.x * block.y * block.z, shared,
            (unsigned long long)multiply_adds, (unsigned long long)bytes_read, (unsigned long long)bytes_written);
  if (f) fclose(f);
  multiply_adds = bytes_read = bytes_written = 0;
}

} // namespace uly_emulated
