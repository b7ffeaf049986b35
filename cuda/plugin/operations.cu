// The operations: their names, the kernels that are registered for each, and the choice of a
// kernel.
#include <string.h>

#include <vector>

#include "device.h"

namespace {

struct Operation {
  const char *name;
  int64_t bytes;
};
#define OPERATION(op, name, args) {#name, sizeof(args)},
const Operation operations[ULY_OPS] = {ULY_ALL_OPERATIONS(OPERATION)};
#undef OPERATION

// kernels_for returns the kernels of an operation in the order in which they are tried.
std::vector<uly_kernel> &kernels_for(int32_t op) {
  // constructed by the first RegisterKernels, before main
  static std::vector<uly_kernel> kernels[ULY_OPS];
  return kernels[op];
}

std::string kernel_names(int32_t op) {
  std::string s;
  for (const uly_kernel &r : kernels_for(op)) s += (s.empty() ? "" : ", ") + std::string(r.name);
  return s;
}

// choose returns the kernel that runs a call; NULL if no kernel supports it.
const uly_kernel *choose(Device *d, int32_t op, const void *args) {
  if (const uly_kernel *pin = d->pin[op]) return !pin->supports || pin->supports(d, args) ? pin : nullptr;
  for (const uly_kernel &r : kernels_for(op))
    if (!r.supports || r.supports(d, args)) return &r;
  return nullptr;
}

// unserved returns the error of a call that no kernel supports. The device's message has the
// reasons that the kernels gave.
int32_t unserved(Device *d, int32_t op) {
  const std::string why = d->text.empty() ? "" : ": " + d->text;
  if (d->pin[op])
    return fail(d, ULY_UNSUPPORTED,
                "%s: the kernel '%s', which ULYSSES_KERNEL selects, does not support this call%s; kernels are %s",
                operations[op].name, d->pin[op]->name, why.c_str(), kernel_names(op).c_str());
  return fail(d, ULY_UNSUPPORTED, "%s: no kernel supports this call%s; kernels are %s", operations[op].name,
              why.c_str(), kernel_names(op).c_str());
}

} // namespace

RegisterKernels::RegisterKernels(std::initializer_list<uly_kernel> kernels, bool first) {
  for (const uly_kernel &r : kernels) {
    std::vector<uly_kernel> &all = kernels_for(r.op);
    all.insert(first ? all.begin() : all.end(), r);
  }
}

// read_pins parses ULYSSES_KERNEL: operation=kernel,…
int32_t read_pins(Device *d) {
  size_t at = 0;
  while (at < d->pins.size()) {
    size_t end = d->pins.find(',', at);
    if (end == std::string::npos) end = d->pins.size();
    std::string pin = d->pins.substr(at, end - at);
    at = end + 1;
    if (pin.empty()) continue;
    size_t is = pin.find('=');
    std::string name = pin.substr(0, is), kernel = is == std::string::npos ? "" : pin.substr(is + 1), names;
    int32_t op = -1;
    for (int32_t i = 0; i < ULY_OPS; i++) {
      if (name == operations[i].name) op = i;
      names += (i ? ", " : "") + std::string(operations[i].name);
    }
    if (op < 0)
      return fail(d, ULY_INVALID_ARGUMENT,
                  "ULYSSES_KERNEL: '%s' names no operation; use operation=kernel with one of the operations %s",
                  pin.c_str(), names.c_str());
    d->pin[op] = nullptr; // the last kernel that is named for an operation counts
    for (const uly_kernel &r : kernels_for(op))
      if (kernel == r.name) d->pin[op] = &r;
    if (!d->pin[op])
      return fail(d, ULY_INVALID_ARGUMENT, "ULYSSES_KERNEL: %s has no kernel '%s'; its kernels are %s", name.c_str(),
                  kernel.c_str(), kernel_names(op).c_str());
  }
  return ULY_OK;
}

int32_t api_enqueue(uly_device *d, uly_stream *s, int32_t op, const void *args, int64_t args_bytes) {
  return guarded(d, [&] {
    if (op < 0 || op >= ULY_OPS) return fail(d, ULY_INVALID_ARGUMENT, "operation %d does not exist", op);
    const Operation &o = operations[op];
    if (s->wrapped)
      return fail(d, ULY_INVALID_ARGUMENT, "%s: the stream belongs to the host program and cannot run operations",
                  o.name);
    if (args_bytes != o.bytes)
      return fail(d, ULY_INVALID_ARGUMENT, "%s: the arguments have %lld bytes, not %lld", o.name, (long long)args_bytes,
                  (long long)o.bytes);
    d->text.clear();
    const uly_kernel *kernel = choose(of(d), op, args);
    if (op != ULY_OP_COPY && op != ULY_OP_ROPE) launch_group(s);
    return kernel ? kernel->run(d, s, args) : unserved(of(d), op);
  });
}

int32_t api_workspace(uly_device *d, const uly_attention *a, int32_t backward, int64_t *bytes) {
  return guarded_or_absent(d, [&] {
    *bytes = attention_workspace(d, a, backward != 0);
    return (int32_t)ULY_OK;
  });
}

int32_t api_delta_sizes(uly_device *d, const uly_gated_delta *a, uly_delta_sizes *out) {
  return guarded_or_absent(d, [&] {
    *out = {};
    return delta_sizes(d, a, out);
  });
}

int32_t api_kernel_of(uly_device *d, int32_t op, const void *args, const char **name) {
  return guarded_or_absent(d, [&] {
    *name = "";
    if (op < 0 || op >= ULY_OPS) return fail(d, ULY_INVALID_ARGUMENT, "operation %d does not exist", op);
    d->text.clear();
    const uly_kernel *kernel = choose(of(d), op, args);
    if (!kernel) return unserved(of(d), op);
    *name = kernel->name;
    return (int32_t)ULY_OK;
  });
}
