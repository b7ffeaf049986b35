// Argument checks of the operations. They check what memory safety needs: types, shapes, dense last
// axes, device memory, alignment. Package device has checked the meaning of the arguments before.
#pragma once

#include <stdarg.h>

#include <initializer_list>
#include <string>

#include "index.h"
#include "plugin.h"

inline std::string list_of(const int64_t *x, int n) {
  std::string s = "[";
  for (int i = 0; i < n; i++) s += (i ? ", " : "") + (x[i] < 0 ? std::string("any") : std::to_string(x[i]));
  return s + "]";
}

inline const char *name_of(int dtype) {
  static const char *names[] = {"nil", "F32", "BF16", "F16", "F64", "I32", "I64", "U8"};
  return dtype >= 0 && dtype <= ULY_U8 ? names[dtype] : "unknown type";
}

// text_of formats a tensor as Go's tensor.String does: "F32[4, 8]", with strides unless row-major.
inline std::string text_of(const uly_tensor &t) {
  if (t.dtype == 0) return "nil";
  std::string s = name_of(t.dtype) + list_of(t.shape, t.ndim);
  if (!contiguous(t)) s += " strides " + list_of(t.stride, t.ndim);
  if (t.where == ULY_HOST) s += " in host memory";
  return s;
}

// Shape is a required shape. An extent of -1 accepts any extent.
struct Shape {
  int n = 0;
  int64_t extent[8];
  Shape(std::initializer_list<int64_t> x) {
    for (int64_t v : x) extent[n++] = v;
  }
  explicit Shape(const uly_tensor &t) {
    n = t.ndim;
    for (int i = 0; i < n; i++) extent[i] = t.shape[i];
  }
};

// misaligned reports whether p is not a multiple of the type's size. A misaligned access is a CUDA
// error after which the process cannot use its GPU any more.
inline bool misaligned(const void *p, int dtype) {
  return size_of(dtype) > 0 && (uintptr_t)p % (uintptr_t)size_of(dtype) != 0;
}

inline bool same_shape(const uly_tensor &a, const uly_tensor &b) {
  bool ok = a.ndim == b.ndim;
  for (int i = 0; ok && i < a.ndim; i++) ok = a.shape[i] == b.shape[i];
  return ok;
}

// Check checks the arguments of one operation. `code` is the code of the first failure, whose
// message is in the device. After a failure, further checks do nothing.
class Check {
 public:
  Check(uly_device *device, const char *operation) : d(device), op(operation) {}

  bool failed() const { return code != ULY_OK; }

  void refuse(const char *format, ...) __attribute__((format(printf, 2, 3))) {
    if (failed()) return;
    char text[768];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    code = fail(d, ULY_INVALID_ARGUMENT, "cuda.%s: %s", op, text);
  }

  // shape requires device memory with a type and shape.
  void shape(const char *name, const uly_tensor &t, int dtype, const Shape &want) {
    bool ok = t.dtype == dtype && t.where == ULY_CUDA && t.ndim == want.n;
    for (int i = 0; ok && i < want.n; i++) ok = want.extent[i] < 0 ? t.shape[i] >= 0 : t.shape[i] == want.extent[i];
    if (!ok)
      refuse("%s is %s; want %s%s in device memory", name, text_of(t).c_str(), name_of(dtype),
             list_of(want.extent, want.n).c_str());
    else if (elements(t) == 0) return;
    else if (t.data == nullptr) refuse("%s is %s without memory", name, text_of(t).c_str());
    else if (misaligned(t.data, dtype))
      refuse("%s is %s at %p: the address must be a multiple of %lld bytes", name, text_of(t).c_str(), t.data,
             (long long)size_of(dtype));
  }

  // rows requires a shape and a dense last axis.
  void rows(const char *name, const uly_tensor &t, int dtype, const Shape &want) {
    shape(name, t, dtype, want);
    if (t.ndim > 0 && t.shape[t.ndim - 1] > 1 && t.stride[t.ndim - 1] != 1)
      refuse("%s is %s: its last axis must be dense", name, text_of(t).c_str());
  }

  // dense requires a shape in row-major order without gaps.
  void dense(const char *name, const uly_tensor &t, int dtype, const Shape &want) {
    shape(name, t, dtype, want);
    if (!contiguous(t)) refuse("%s is %s: it must be dense", name, text_of(t).c_str());
  }

  // documents requires document bounds in host memory: ascending, from 0 to `rows`.
  void documents(const char *name, const uly_list &cu, int64_t rows) {
    const int64_t count = cu.documents();
    if (!cu || count < 0 || cu[0] != 0 || cu[count] != rows)
      return refuse("%s of %lld documents for %lld rows must begin with 0 and end with the number of rows", name,
                    (long long)count, (long long)rows);
    for (int64_t i = 0; i < count; i++)
      if (cu[i + 1] < cu[i])
        return refuse("%s[%lld] = %lld is less than the %lld before it", name, (long long)i + 1, (long long)cu[i + 1],
                      (long long)cu[i]);
  }

  // compute requires F32 or BF16. It returns the type.
  int compute(const char *name, const uly_tensor &t) {
    if (t.dtype != ULY_F32 && t.dtype != ULY_BF16) refuse("%s is %s: want F32 or BF16", name, text_of(t).c_str());
    return t.dtype;
  }

  int32_t code = ULY_OK;

 private:
  uly_device *d;
  const char *op;
};
