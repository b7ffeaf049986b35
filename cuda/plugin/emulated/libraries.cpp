// The functions of libraries/libraries.h in the emulated build. NVIDIA's libraries are reported as
// missing, and the emulated runtime replaces the driver.
#include "libraries/libraries.h"

#include <stdlib.h>
#include <string.h>

bool library_open(library) { return false; }
std::string library_reason(library) { return "this plug-in emulates a GPU and uses no libraries"; }
std::string library_path(library) { return ""; }
std::string library_fix(library) { return "none is needed: the emulated plug-in is for tests"; }
std::string library_version(library) { return ""; }
void libraries_close(uly_device *) {}

bool sdpa_fits(uly_device *, const AttentionArgs &) { return false; }
int64_t sdpa_workspace(uly_device *, const AttentionArgs &) { return 0; }

void *thread_context() {
  int ordinal = 0;
  cudaGetDevice(&ordinal);
  return reinterpret_cast<void *>((intptr_t)ordinal);
}

void thread_context_set(void *was) { cudaSetDevice((int)reinterpret_cast<intptr_t>(was)); }

bool memory_range(const void *p, char **base, int64_t *bytes) {
  void *b = nullptr;
  size_t n = 0;
  if (!uly_emulated::range(p, &b, &n)) return false;
  *base = static_cast<char *>(b), *bytes = (int64_t)n;
  return true;
}

bool memory_generation(const void *p, uint64_t *generation) { return uly_emulated::generation(p, generation); }

static int32_t none(uly_device *d) { return fail(d, ULY_UNSUPPORTED, "cuda: no NCCL in the emulated plug-in"); }

int32_t nccl_ordered(uly_device *, int32_t *ordered) {
  const char *set = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  *ordered = set && strcmp(set, "1") == 0;
  return ULY_OK;
}
int32_t nccl_id(uly_device *d, char *) { return none(d); }
int32_t nccl_init(uly_device *d, const char *, int32_t, int32_t, uly_nccl **) { return none(d); }
int32_t nccl_close(uly_device *, uly_nccl *) { return ULY_OK; }
int32_t nccl_abort(uly_device *, uly_nccl *) { return ULY_OK; }
int32_t nccl_error(uly_device *d, uly_nccl *, char *, int64_t) { return none(d); }
int32_t nccl_all_to_all(uly_device *d, uly_nccl *, uly_stream *, void *, const int64_t *, const int64_t *, const void *,
                        const int64_t *, const int64_t *) {
  return none(d);
}
int32_t nccl_all_gather(uly_device *d, uly_nccl *, uly_stream *, void *, const void *, int64_t) { return none(d); }
int32_t nccl_all_reduce(uly_device *d, uly_nccl *, uly_stream *, void *, int64_t, int32_t) { return none(d); }
int32_t nccl_reduce_scatter(uly_device *d, uly_nccl *, uly_stream *, void *, const void *, int64_t, int32_t) {
  return none(d);
}
int32_t nccl_broadcast(uly_device *d, uly_nccl *, uly_stream *, void *, int64_t, int32_t) { return none(d); }
int32_t nccl_send_recv(uly_device *d, uly_nccl *, uly_stream *, void *, int64_t, int32_t, const void *, int64_t,
                       int32_t) {
  return none(d);
}
