// Looks for NVIDIA's libraries at run time: what a variable names, else what a host program has in
// memory already, ULYSSES_NVIDIA_ROOT (a site-packages/nvidia), the packages of an active virtual
// environment, the system's loader, CUDA's usual folder.
#include "dl.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <stdlib.h>

#include <mutex>
#include <vector>

namespace {

struct place {
  const char *variable, *file, *folder; // folder: below site-packages/nvidia
  int flags;
  const char *version; // a function that tells it
  const char *remedy;
  size_t least; // the oldest that serves, as that function counts; 0 = any that has the functions
};

// cuDNN opens NVRTC and cuBLASLt, and NVRTC its builtins, by bare names, and ends the process where
// one is missing: they are there before.
const place places[] = {
    {"ULYSSES_CUDA_DRIVER_LIB", "libcuda.so.1", nullptr, RTLD_LOCAL, "cuDriverGetVersion",
     "install NVIDIA's driver, 580 or newer; start containers with access to GPUs (--gpus all, --nv)", 0},
    {"ULYSSES_CUBLASLT_LIB", "libcublasLt.so.13", "cu13", RTLD_LOCAL, "cublasLtGetVersion",
     "pip install nvidia-cublas==13.1.0.3", 0},
    {"ULYSSES_CUDNN_LIB", "libcudnn.so.9", "cudnn", RTLD_LOCAL, "cudnnGetVersion",
     "pip install nvidia-cudnn-cu13==9.19.0.56",
     // before, attention's backward pass of several documents reads workspace that nobody has
     // written (github.com/NVIDIA/TransformerEngine/issues/2186)
     91800},
    {"ULYSSES_NVRTC_LIB", "libnvrtc.so.13", "cu13", RTLD_GLOBAL, "nvrtcVersion",
     "pip install nvidia-cuda-nvrtc==13.0.88", 0},
    {"ULYSSES_NCCL_LIB", "libnccl.so.2", "nccl", RTLD_LOCAL, "ncclGetVersion", "pip install nvidia-nccl-cu13==2.28.9",
     0},
};
enum { LIBRARIES = sizeof places / sizeof *places };

struct state {
  bool tried = false;
  void *handle = nullptr;
  std::string why;
  forward *functions = nullptr;
};

std::recursive_mutex lock;
state &state_of(library l) {
  static state all[LIBRARIES]; // inside a function, because forwards enter themselves before main
  return all[l];
}

std::string variable(const char *name) {
  const char *v = getenv(name);
  return v ? v : "";
}

// candidates are paths in the order of trial; an explicit one stands alone.
std::vector<std::string> candidates(const place &p) {
  std::string named = variable(p.variable);
  if (!named.empty()) return {named};
  if (!p.folder) return {p.file};
  std::vector<std::string> all;
  const std::string below = std::string("/") + p.folder + "/lib/" + p.file;
  std::string root = variable("ULYSSES_NVIDIA_ROOT");
  if (!root.empty()) all.push_back(root + below);
  for (const char *environment : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    std::string folder = variable(environment);
    glob_t found = {};
    if (!folder.empty() &&
        glob((folder + "/lib/python3*/site-packages/nvidia" + below).c_str(), 0, nullptr, &found) == 0)
      for (size_t i = 0; i < found.gl_pathc; i++) all.push_back(found.gl_pathv[i]);
    globfree(&found);
  }
  all.push_back(p.file);
  all.push_back(std::string("/usr/local/cuda/lib64/") + p.file);
  return all;
}

std::string path_of(void *handle) {
  struct link_map *map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name ? map->l_name : "";
}

// The file of builtins lies beside NVRTC and has its version in its name; a bare soname is in
// nobody's path.
void open_builtins(const std::string &nvrtc) {
  size_t slash = nvrtc.rfind('/');
  glob_t found = {};
  if (slash != std::string::npos &&
      glob((nvrtc.substr(0, slash) + "/libnvrtc-builtins.so.13*").c_str(), 0, nullptr, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc; i++)
      if (dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_GLOBAL)) break;
  globfree(&found);
}

std::string dotted(size_t v) {
  return std::to_string(v / 10000) + "." + std::to_string(v % 10000 / 100) + "." + std::to_string(v % 100);
}

// drop gives a library back that does not serve.
void drop(state &s, const std::string &why) {
  s.why = path_of(s.handle) + why;
  for (forward *f = s.functions; f; f = f->next) *f->slot = nullptr;
  dlclose(s.handle);
  s.handle = nullptr;
}

bool open(library l) {
  const place &p = places[l];
  state &s = state_of(l);
  for (library need : {LIB_NVRTC, LIB_CUBLASLT}) {
    if (l != LIB_CUDNN || library_open(need)) continue;
    s.why = std::string("needs ") + places[need].file + ", which is missing";
    return false;
  }
  std::string absent, broken;
  // One that is in memory comes before others: of cuDNN's parts, which it opens by bare names, the
  // process has one set.
  if (variable(p.variable).empty()) s.handle = dlopen(p.file, RTLD_NOW | RTLD_NOLOAD | p.flags);
  for (const std::string &path : candidates(p)) {
    if (s.handle) break;
    s.handle = dlopen(path.c_str(), RTLD_NOW | p.flags);
    if (s.handle) break;
    std::string text = dlerror();
    // A file that is there and does not load is the better reason.
    if (text.find("No such file") == std::string::npos) broken += (broken.empty() ? "" : "; ") + text;
    absent += (absent.empty() ? "" : ", ") + path;
  }
  if (!s.handle) {
    s.why = broken.empty() ? "not found: " + absent : broken;
    return false;
  }
  for (forward *f = s.functions; f; f = f->next) {
    *f->slot = dlsym(s.handle, f->name);
    if (*f->slot || !f->needed) continue;
    drop(s, std::string(" has no ") + f->name + ": it is too old");
    return false;
  }
  if (p.least) {
    void *version = dlsym(s.handle, p.version);
    const size_t v = version ? reinterpret_cast<size_t (*)()>(version)() : 0;
    if (v < p.least) {
      drop(s, " is " + dotted(v) + ": " + dotted(p.least) + " or newer is needed");
      return false;
    }
  }
  if (l == LIB_NVRTC) open_builtins(path_of(s.handle));
  return true;
}

} // namespace

forward::forward(library l, const char *name, bool needed, void **slot)
    : name(name), needed(needed), slot(slot), next(state_of(l).functions) {
  state_of(l).functions = this;
}

bool library_open(library l) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  state &s = state_of(l);
  if (!s.tried) {
    s.tried = true;
    open(l);
  }
  return s.handle != nullptr;
}

std::string library_reason(library l) {
  library_open(l);
  return state_of(l).why;
}

std::string library_path(library l) { return library_open(l) ? path_of(state_of(l).handle) : ""; }

std::string library_remedy(library l) {
  const place &p = places[l];
  if (!p.folder) return p.remedy;
  return std::string(p.remedy) + " and set ULYSSES_NVIDIA_ROOT to its site-packages/nvidia; or set " + p.variable +
         " to a " + p.file + ", or load CUDA's module";
}

std::string library_version(library l) {
  if (!library_open(l)) return "";
  void *f = dlsym(state_of(l).handle, places[l].version);
  if (!f) return "";
  int v = 0, w = 0;
  switch (l) {
    case LIB_DRIVER:
      reinterpret_cast<int (*)(int *)>(f)(&v);
      return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); // CUDA's, that it serves
    case LIB_CUBLASLT:
    case LIB_CUDNN: return dotted(reinterpret_cast<size_t (*)()>(f)());
    case LIB_NVRTC:
      reinterpret_cast<int (*)(int *, int *)>(f)(&v, &w);
      return std::to_string(v) + "." + std::to_string(w);
    case LIB_NCCL: reinterpret_cast<int (*)(int *)>(f)(&v); return dotted(static_cast<size_t>(v));
  }
  return "";
}
