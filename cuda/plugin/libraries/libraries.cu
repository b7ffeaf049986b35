// What doctor and the device say of NVIDIA's libraries, and what is kept with a device for them.
#include "library.h"

namespace {

struct row {
  const char *name, *costs;
};

const row rows[ULY_LIBRARIES] = {
    {"CUDA driver", "no GPU can be used"},
    {"cuBLASLt", "matrix products run on a plain kernel, many times slower"},
    {"cuDNN",
     "attention in BF16 runs on kernels of our own, slower, and many times slower where head sizes are not multiples "
     "of 16"},
    {"NVRTC", "cuDNN, which needs it, cannot be used for attention"},
    {"NCCL", "GPUs exchange over CUDA IPC, or through host memory between nodes"},
};

void put(char *to, size_t size, const std::string &text) { snprintf(to, size, "%s", text.c_str()); }

} // namespace

void probe_libraries(uly_probe *out) {
  for (int i = 0; i < ULY_LIBRARIES; i++) {
    uly_library &l = out->library[i];
    put(l.name, sizeof l.name, rows[i].name);
    l.found[0] = l.costs[0] = l.remedy[0] = 0;
#ifdef ULY_EMULATED
    l.ok = 0;
    put(l.found, sizeof l.found, "not used: this plug-in emulates a GPU");
    put(l.costs, sizeof l.costs, rows[i].costs);
    put(l.remedy, sizeof l.remedy, "none: it is for tests");
#else
    const library which = static_cast<library>(i);
    l.ok = library_open(which);
    if (l.ok) {
      put(l.found, sizeof l.found, library_version(which) + ", " + library_path(which));
    } else {
      put(l.found, sizeof l.found, library_reason(which));
      put(l.costs, sizeof l.costs, rows[i].costs);
      put(l.remedy, sizeof l.remedy, library_remedy(which));
    }
#endif
  }
}

std::string libraries_text(uly_device *) {
#ifdef ULY_EMULATED
  return "no libraries";
#else
  std::string text;
  for (int i = LIB_CUBLASLT; i <= LIB_CUDNN; i++) {
    std::string version = library_version(static_cast<library>(i));
    text += std::string(i == LIB_CUBLASLT ? "" : ", ") +
            (version.empty() ? std::string("no ") + rows[i].name : rows[i].name + (" " + version));
  }
  return text;
#endif
}

device_libraries &libraries_of(uly_device *d) {
  if (!d->libraries) d->libraries = new device_libraries;
  return *static_cast<device_libraries *>(d->libraries);
}

void libraries_close(uly_device *d) {
  device_libraries *l = static_cast<device_libraries *>(d->libraries);
  if (!l) return;
  delete l->gemm;
  delete l->sdpa;
  delete l;
  d->libraries = nullptr;
}
