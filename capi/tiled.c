// Tiled compute (tiled_compute, tiled_compute_backward): a loop over ranges of rows, which calls
// the host's callback with views of the tensors. It needs no Go code, allocates nothing and reads
// no tensor data. Package tile computes the tiles of the Go program.
#include <string.h>

#include "message.h"
#include "ulysses.h"

enum { MAX_TENSORS = 32, MAX_AXES = 8 };

// A list of the caller's tensors, with the views of one tile that the callback gets.
typedef struct {
  const char *name;
  int optional;                       // tensors may be NULL
  const ulysses_tensor *const *given; // NULL if the caller has no such list
  const int32_t *dim;                 // the axis of each tensor, see axis_of
  int32_t n;
  ulysses_tensor view[MAX_TENSORS];
  int64_t shape[MAX_TENSORS][MAX_AXES], strides[MAX_TENSORS][MAX_AXES];
  const ulysses_tensor *shown[MAX_TENSORS]; // &view[i], or NULL
} list;

// axis_of returns the axis along which tensor i is divided into tiles; -1 = it is passed whole.
static int32_t axis_of(const list *l, int i) { return l->dim ? l->dim[i] : 0; }

#define INVALID(...) uly_fail(ULYSSES_INVALID_ARGUMENT, __VA_ARGS__)

// prepare_tensor checks tensor i of a list and makes its view, with strides. *rows is the number of
// rows of the tensors that are divided, -1 before the first of them.
static ulysses_status prepare_tensor(const char *op, list *l, int i, int64_t *rows) {
  const ulysses_tensor *t = l->given[i];
  if (t->ndim < 0 || t->ndim > MAX_AXES || (t->ndim > 0 && !t->shape))
    return INVALID("%s: %s[%d] has %d axes%s; give 0 to %d axes and a shape", op, l->name, i,
                   t->ndim, t->shape ? "" : " and its shape is NULL", MAX_AXES);
  int32_t axis = axis_of(l, i);
  if (axis < -1 || axis >= t->ndim)
    return INVALID("%s: %s[%d] has %d axes and is to be divided along axis %d; -1 passes it whole",
                   op, l->name, i, t->ndim, axis);
  int64_t step = 1;
  for (int k = t->ndim - 1; k >= 0; k--) {
    long long extent = t->shape[k];
    if (extent < 0)
      return INVALID("%s: %s[%d] has the negative extent %lld", op, l->name, i, extent);
    l->shape[i][k] = extent;
    l->strides[i][k] = t->strides ? t->strides[k] : step;
    if (extent == 0) continue;
    if (step > INT64_MAX / 64 / extent)
      return INVALID("%s: %s[%d] has too many elements; axis %d has extent %lld", op, l->name, i, k,
                     extent);
    step *= extent;
  }
  if (axis >= 0) {
    if (*rows < 0) *rows = t->shape[axis];
    if (t->shape[axis] != *rows)
      return INVALID(
          "%s: %s[%d] has %lld rows along axis %d and a tensor before it has %lld; all "
          "divided tensors need the same number of rows",
          op, l->name, i, (long long)t->shape[axis], axis, (long long)*rows);
    // Without this check, a tensor whose lanes were not set has the same rows in every tile.
    int64_t bits = (int64_t)t->bits * t->lanes;
    if (bits == 0 || (*rows > 1 && bits % 8 * (l->strides[i][axis] % 8) % 8))
      return INVALID(
          "%s: %s[%d] has elements of %d bits and %d lanes, and stride %lld along axis %d, so not "
          "every row starts at a byte; set bits and lanes as ulysses_tensor_of does, or pass it "
          "whole",
          op, l->name, i, t->bits, t->lanes, (long long)l->strides[i][axis], axis);
  }
  l->view[i] = *t;
  l->view[i].shape = l->shape[i];
  l->view[i].strides = l->strides[i];
  l->shown[i] = &l->view[i];
  return ULYSSES_OK;
}

// prepare checks the tensors of a list and makes their views.
static ulysses_status prepare(const char *op, list *l, int64_t *rows) {
  for (int i = 0; i < l->n; i++) {
    l->shown[i] = NULL;
    if (l->given && l->given[i]) {
      ulysses_status s = prepare_tensor(op, l, i, rows);
      if (s) return s;
    } else if (!l->optional) {
      return INVALID("%s: %s[%d] is NULL; give a tensor", op, l->name, i);
    }
  }
  return ULYSSES_OK;
}

// restrict_rows restricts the views of a list to rows [lo, hi).
static void restrict_rows(list *l, int64_t lo, int64_t hi) {
  for (int i = 0; i < l->n; i++) {
    int32_t axis = axis_of(l, i);
    if (!l->shown[i] || axis < 0) continue;
    int64_t bits = (int64_t)l->given[i]->bits * l->given[i]->lanes;
    l->shape[i][axis] = hi - lo;
    l->view[i].byte_offset =
        l->given[i]->byte_offset + (uint64_t)(hi > lo ? lo * l->strides[i][axis] * bits / 8 : 0);
  }
}

// read_args copies the caller's arguments, which may be of an older or a newer header, and checks
// the numbers.
static ulysses_status read_args(const char *op, const ulysses_tiled_args *p,
                                ulysses_tiled_args *a) {
  if (!p) return INVALID("%s: args is NULL; give a struct that ULYSSES_INIT has prepared", op);
  uint32_t given = p->struct_size;
  if (given < 4 || given % 8 || given > 65536)
    return INVALID(
        "%s: args.struct_size is %u, this library's struct has %zu bytes; use "
        "ULYSSES_INIT",
        op, given, sizeof *a);
  for (uint32_t i = sizeof *a; i < given; i++)
    if (((const unsigned char *)p)[i])
      return INVALID(
          "%s: args.struct_size is %u and byte %u is not zero: it belongs to a field of "
          "a newer header; set it to zero, or use a newer library",
          op, given, i);
  memset(a, 0, sizeof *a);
  memcpy(a, p, given < sizeof *a ? given : sizeof *a);
  if (a->n_in < 0 || a->n_in > MAX_TENSORS || a->n_out < 0 || a->n_out > MAX_TENSORS)
    return INVALID("%s: n_in is %d and n_out %d; give 0 to %d for each", op, a->n_in, a->n_out,
                   MAX_TENSORS);
  if (a->reserved) return INVALID("%s: args.reserved is %d; leave it 0", op, a->reserved);
  if (a->tile_rows < 0 || a->max_rows < 0)
    return INVALID("%s: tile_rows is %lld and max_rows %lld; give 0 or more", op,
                   (long long)a->tile_rows, (long long)a->max_rows);
  if (a->n_in > 0 && !a->in) return INVALID("%s: in is NULL and n_in is %d", op, a->n_in);
  return ULYSSES_OK;
}

// divide sets the number of tiles, which is equal on all ranks with the same max_rows, and *step,
// the rows of each tile except the last.
static ulysses_status divide(const char *op, const ulysses_tiled_args *a, int64_t rows,
                             ulysses_tile *t, int64_t *step) {
  int64_t max_rows = a->max_rows ? a->max_rows : rows;
  if (rows < 0)
    return INVALID(
        "%s: every tensor is passed whole, so there are no rows; set the axis of one of "
        "them",
        op);
  if (max_rows < rows)
    return INVALID(
        "%s: max_rows is %lld and this rank has %lld rows; give the largest number of "
        "all ranks",
        op, (long long)max_rows, (long long)rows);
  memset(t, 0, sizeof *t);
  t->struct_size = sizeof *t;
  t->stream = a->stream;
  t->count = a->tile_rows && max_rows ? (max_rows - 1) / a->tile_rows + 1 : 1;
  *step = rows ? (rows - 1) / t->count + 1 : 0;
  return ULYSSES_OK;
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// set_range sets the rows of tile i. i * step may overflow for tiles behind the last row, so it is
// computed only if it is at most `rows`.
static void set_range(ulysses_tile *t, int64_t i, int64_t step, int64_t rows) {
  t->index = i;
  t->lo = step && i > rows / step ? rows : min64(i * step, rows);
  t->hi = min64(t->lo + step, rows);
}

// The tensors of a call: in and out of tiled_compute, or in, dout and din of its backward pass.
typedef struct {
  int n;
  list *lists[3];
} lists;

static ulysses_status call_back(const ulysses_tiled_args *a, const ulysses_tile *t,
                                const lists *l) {
  const ulysses_tensor *const *in = l->lists[0]->shown;
  const ulysses_tensor **last = l->lists[l->n - 1]->shown; // the callback may write these
  if (l->n == 2) return a->forward(a->user, t, in, (ulysses_tensor *const *)last);
  return a->backward(a->user, t, in, l->lists[1]->shown, (ulysses_tensor *const *)last);
}

// walk calls the callback for all tiles in order, and ends at the first that fails.
static ulysses_status walk(const char *op, const ulysses_tiled_args *a, const lists *l) {
  ulysses_tile t;
  ulysses_status s;
  int64_t rows = -1, step;
  for (int k = 0; k < l->n; k++)
    if ((s = prepare(op, l->lists[k], &rows))) return s;
  if ((s = divide(op, a, rows, &t, &step))) return s;
  for (int64_t i = 0; i < t.count; i++) {
    set_range(&t, i, step, rows);
    for (int k = 0; k < l->n; k++) restrict_rows(l->lists[k], t.lo, t.hi);
    if ((s = call_back(a, &t, l))) return uly_callback_failed(s, op, i, t.count);
  }
  uly_clear_error(); // a call that has failed inside a callback has left its message
  return ULYSSES_OK;
}

API ulysses_status tiled_compute(const ulysses_tiled_args *p) {
  static const char op[] = "tiled_compute";
  ulysses_tiled_args a;
  uly_clear_error();
  ulysses_status s = read_args(op, p, &a);
  if (s) return s;
  if (!a.forward) return INVALID("%s: forward is NULL; give a callback", op);
  if (a.n_out > 0 && !a.out) return INVALID("%s: out is NULL and n_out is %d", op, a.n_out);
  list in = {.name = "in", .given = a.in, .dim = a.in_dim, .n = a.n_in};
  list out = {
      .name = "out", .given = (const ulysses_tensor *const *)a.out, .dim = a.out_dim, .n = a.n_out};
  return walk(op, &a, &(lists){2, {&in, &out}});
}

API ulysses_status tiled_compute_backward(const ulysses_tiled_args *p) {
  static const char op[] = "tiled_compute_backward";
  ulysses_tiled_args a;
  uly_clear_error();
  ulysses_status s = read_args(op, p, &a);
  if (s) return s;
  if (!a.backward) return INVALID("%s: backward is NULL; give a callback", op);
  list in = {.name = "in", .given = a.in, .dim = a.in_dim, .n = a.n_in};
  list dout = {.name = "dout", .optional = 1, .given = a.dout, .dim = a.out_dim, .n = a.n_out};
  list din = {.name = "din",
              .optional = 1,
              .given = (const ulysses_tensor *const *)a.din,
              .dim = a.in_dim,
              .n = a.n_in};
  return walk(op, &a, &(lists){3, {&in, &dout, &din}});
}
