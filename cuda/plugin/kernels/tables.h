// Tables writes int64 tables of documents and heads to a workspace in device memory. The values are
// arguments of kernels, so they are written in stream order, and the caller may free its arrays
// when the call returns.
#pragma once

#include "plugin.h"

enum { TABLE_ENTRIES = 240 };
struct TableEntries {
  char *to;
  int n;
  int64_t at[TABLE_ENTRIES], value[TABLE_ENTRIES];
};
static __global__ void tables_put(TableEntries e) {
  if ((int)threadIdx.x < e.n) *(int64_t *)(e.to + e.at[threadIdx.x]) = e.value[threadIdx.x];
}

// Tables collects entries (byte offset and value). It launches a kernel for every TABLE_ENTRIES
// entries; end launches the last one.
class Tables {
 public:
  Tables(uly_device *device, uly_stream *stream, const char *what, void *to) : d(device), s(stream), what(what) {
    e.to = (char *)to, e.n = 0;
  }
  void operator()(int64_t at, int64_t value) {
    e.at[e.n] = at;
    e.value[e.n++] = value;
    if (e.n == TABLE_ENTRIES) send();
  }
  int32_t end() {
    send();
    return code;
  }

 private:
  void send() {
    if (e.n > 0 && code == ULY_OK) {
      LAUNCH(tables_put, 1, 256, 0, s, e);
      code = check_launch(d, what);
    }
    e.n = 0;
  }
  uly_device *d;
  uly_stream *s;
  const char *what;
  int32_t code = ULY_OK;
  TableEntries e;
};
