#define _GNU_SOURCE
#include "own.h"

#include <dlfcn.h>
#include <stdlib.h>

static char *own_path;

// The loader keeps the path with which it has found the file. The path may be relative to the
// working folder at that time, and constructors run before the host program can change the folder.
__attribute__((constructor)) static void find_own_path(void) {
  Dl_info info;
  if (dladdr((void *)find_own_path, &info) && info.dli_fname != NULL) own_path = realpath(info.dli_fname, NULL);
}

const char *uly_own_path(void) { return own_path; }
