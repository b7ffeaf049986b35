// C++17 classes over ulysses.h: handles that destroy themselves, and errors as exceptions. An
// ulysses::error has the status as its code, and the library's message as its text.
#pragma once
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include "ulysses.h"

namespace ulysses {

struct error : std::runtime_error {
  ulysses_status code;
  explicit error(ulysses_status s) : std::runtime_error(ulysses_last_error()), code(s) {}
};

inline void check(ulysses_status s) {
  if (s != ULYSSES_OK) throw error(s);
}

// init returns a struct of the library that ULYSSES_INIT has prepared.
template <class T> T init() {
  T t;
  ULYSSES_INIT(&t);
  return t;
}

struct destroy {
  void operator()(ulysses_context *c) const { ulysses_context_destroy(c); }
  void operator()(ulysses_plan *p) const { ulysses_plan_destroy(p); }
  void operator()(ulysses_batch *b) const { ulysses_batch_destroy(b); }
};
using context = std::unique_ptr<ulysses_context, destroy>;
using plan = std::unique_ptr<ulysses_plan, destroy>;
using batch = std::unique_ptr<ulysses_batch, destroy>;

// A context of one rank.
inline context local(const ulysses_options *o = nullptr) {
  ulysses_context *c = nullptr;
  check(ulysses_context_create_local(o, &c));
  return context(c);
}

// A context on an MPI communicator, given as MPI_Comm_c2f(comm). Collective.
inline context mpi(std::int64_t fortran_comm, const ulysses_options *o = nullptr) {
  ulysses_context *c = nullptr;
  check(ulysses_context_create_mpi(fortran_comm, o, &c));
  return context(c);
}

// A plan for attention. Collective.
inline plan attention(const context &c, const ulysses_attention_desc &d) {
  ulysses_plan *p = nullptr;
  check(ulysses_attention_plan(c.get(), &d, &p));
  return plan(p);
}

// A batch. Collective.
inline batch lengths(const context &c, const ulysses_batch_desc &d) {
  ulysses_batch *b = nullptr;
  check(ulysses_batch_create(c.get(), &d, &b));
  return batch(b);
}

inline ulysses_batch_info query(const batch &b) {
  auto i = init<ulysses_batch_info>();
  check(ulysses_batch_query(b.get(), &i));
  return i;
}

inline ulysses_sizes sizes(const plan &p, const batch &b) {
  auto s = init<ulysses_sizes>();
  check(ulysses_plan_sizes(p.get(), b.get(), &s));
  return s;
}

// Memory with the alignment that the library needs on the CPU, 64 bytes.
struct release {
  void operator()(void *p) const { std::free(p); }
};
using bytes = std::unique_ptr<void, release>;
inline bytes allocate(std::uint64_t n) { return bytes(std::aligned_alloc(64, (n + 127) / 64 * 64)); }

// A row-major float tensor [B, rows, heads, dim] that owns its memory. It cannot be copied or
// moved, because its view points into it.
class floats {
  std::array<std::int64_t, 4> shape_;
  bytes data_;
  ulysses_tensor view_;

 public:
  explicit floats(std::array<std::int64_t, 4> shape)
      : shape_(shape),
        data_(allocate(static_cast<std::uint64_t>(size()) * sizeof(float))),
        view_(ulysses_tensor_of(data_.get(), ULYSSES_CPU, 0, ULYSSES_F32, 4, shape_.data(), nullptr)) {}
  floats(const floats &) = delete;
  floats &operator=(const floats &) = delete;
  std::int64_t size() const { return shape_[0] * shape_[1] * shape_[2] * shape_[3]; }
  float *data() { return static_cast<float *>(data_.get()); }
  float &operator[](std::int64_t i) { return data()[i]; }
  ulysses_tensor *view() { return &view_; }
};

} // namespace ulysses
