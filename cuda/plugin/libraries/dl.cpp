// Opens NVIDIA's libraries at run time. The search order is: the file that a variable names; a
// library that the host program has already loaded; ULYSSES_NVIDIA_ROOT (a site-packages/nvidia);
// the packages of the active virtual environment; the system's loader; CUDA's usual folder.
#include "dl.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <stdlib.h>

#include <mutex>
#include <vector>

namespace {

struct location {
  const char *variable, *file, *folder; // folder: below site-packages/nvidia
  int flags;
  const char *version; // the library's function that returns its version
  const char *fix;
  size_t minimum; // the oldest supported version, in the number format of that function; 0 = any
};

// cuDNN opens NVRTC and cuBLASLt by bare names, NVRTC opens its builtins in the same way, and both
// end the process if such a library is missing. Therefore these are loaded before cuDNN.
const location locations[] = {
    {"ULYSSES_CUDA_DRIVER_LIB", "libcuda.so.1", nullptr, RTLD_LOCAL, "cuDriverGetVersion",
     "install NVIDIA's driver, 580 or newer; start containers with access to GPUs (--gpus all, --nv)", 0},
    {"ULYSSES_CUBLASLT_LIB", "libcublasLt.so.13", "cu13", RTLD_LOCAL, "cublasLtGetVersion",
     "pip install nvidia-cublas==13.1.0.3", 0},
    {"ULYSSES_CUDNN_LIB", "libcudnn.so.9", "cudnn", RTLD_LOCAL, "cudnnGetVersion",
     "pip install nvidia-cudnn-cu13==9.19.0.56",
     // In older versions, the backward pass of attention with several documents reads uninitialized
     // workspace (github.com/NVIDIA/TransformerEngine/issues/2186).
     91800},
    {"ULYSSES_NVRTC_LIB", "libnvrtc.so.13", "cu13", RTLD_GLOBAL, "nvrtcVersion",
     "pip install nvidia-cuda-nvrtc==13.0.88", 0},
    {"ULYSSES_NCCL_LIB", "libnccl.so.2", "nccl", RTLD_LOCAL, "ncclGetVersion", "pip install nvidia-nccl-cu13==2.28.9",
     0},
};
enum { LIBRARIES = sizeof locations / sizeof *locations };

struct entry {
  bool tried = false;
  void *handle = nullptr;
  std::string why;
  library_function *functions = nullptr;
};

std::recursive_mutex lock; // guards all entries
entry &entry_of(library l) {
  // inside a function, because the constructors of library_function run before main
  static entry all[LIBRARIES];
  return all[l];
}

std::string variable(const char *name) {
  const char *v = getenv(name);
  return v ? v : "";
}

// candidates returns the paths to try, in order. If the variable names a file, it is the only one.
std::vector<std::string> candidates(const location &p) {
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

// open_builtins loads the builtins of NVRTC. Their file lies beside NVRTC and has the version in
// its name; the loader would not find a bare soname there.
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

// drop closes a library that cannot be used and records the reason.
void drop(entry &s, const std::string &why) {
  s.why = path_of(s.handle) + why;
  for (library_function *f = s.functions; f; f = f->next) *f->slot = nullptr;
  dlclose(s.handle);
  s.handle = nullptr;
}

bool open(library l) {
  const location &p = locations[l];
  entry &s = entry_of(l);
  for (library need : {LIB_NVRTC, LIB_CUBLASLT}) {
    if (l != LIB_CUDNN || library_open(need)) continue;
    s.why = std::string("needs ") + locations[need].file + ", which is missing";
    return false;
  }
  std::string absent, broken;
  // A library in memory has priority over other files. cuDNN opens its sublibraries by bare names,
  // so a process can have only one set of them.
  if (variable(p.variable).empty()) s.handle = dlopen(p.file, RTLD_NOW | RTLD_NOLOAD | p.flags);
  for (const std::string &path : candidates(p)) {
    if (s.handle) break;
    s.handle = dlopen(path.c_str(), RTLD_NOW | p.flags);
    if (s.handle) break;
    std::string text = dlerror();
    // An error of a file that exists is more useful than the list of files that do not exist. The
    // text begins with the path, or with the name of a library that the file needs.
    const bool own = text.rfind(path + ": ", 0) == 0;
    if (!own || text.find("No such file") == std::string::npos)
      broken += (broken.empty() ? "" : "; ") + (own ? "" : path + ": ") + text;
    absent += (absent.empty() ? "" : ", ") + path;
  }
  if (!s.handle) {
    s.why = broken.empty() ? "not found: " + absent : broken;
    return false;
  }
  for (library_function *f = s.functions; f; f = f->next) {
    *f->slot = dlsym(s.handle, f->name);
    if (*f->slot || !f->needed) continue;
    drop(s, std::string(" has no ") + f->name + ": it is too old");
    return false;
  }
  if (p.minimum) {
    void *version = dlsym(s.handle, p.version);
    const size_t v = version ? reinterpret_cast<size_t (*)()>(version)() : 0;
    if (v < p.minimum) {
      drop(s, " is " + dotted(v) + ": " + dotted(p.minimum) + " or newer is needed");
      return false;
    }
  }
  if (l == LIB_NVRTC) open_builtins(path_of(s.handle));
  return true;
}

} // namespace

library_function::library_function(library l, const char *name, bool needed, void **slot)
    : name(name), needed(needed), slot(slot), next(entry_of(l).functions) {
  entry_of(l).functions = this;
}

bool library_open(library l) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  entry &s = entry_of(l);
  if (!s.tried) {
    s.tried = true;
    open(l);
  }
  return s.handle != nullptr;
}

std::string library_reason(library l) {
  library_open(l);
  return entry_of(l).why;
}

std::string library_path(library l) { return library_open(l) ? path_of(entry_of(l).handle) : ""; }

std::string library_fix(library l) {
  const location &p = locations[l];
  if (!p.folder) return p.fix;
  return std::string(p.fix) + " and set ULYSSES_NVIDIA_ROOT to its site-packages/nvidia; or set " + p.variable +
         " to a " + p.file + ", or load CUDA's module";
}

std::string library_version(library l) {
  if (!library_open(l)) return "";
  void *f = dlsym(entry_of(l).handle, locations[l].version);
  if (!f) return "";
  int v = 0, w = 0;
  switch (l) {
    case LIB_DRIVER:
      reinterpret_cast<int (*)(int *)>(f)(&v);
      // the CUDA version that the driver supports
      return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
    case LIB_CUBLASLT:
    case LIB_CUDNN: return dotted(reinterpret_cast<size_t (*)()>(f)());
    case LIB_NVRTC:
      reinterpret_cast<int (*)(int *, int *)>(f)(&v, &w);
      return std::to_string(v) + "." + std::to_string(w);
    case LIB_NCCL: reinterpret_cast<int (*)(int *)>(f)(&v); return dotted(static_cast<size_t>(v));
  }
  return "";
}
