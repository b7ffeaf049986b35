// Tiled compute is a walk and views: it needs nothing of Go's. The arithmetic of tiles is package
// tile's.
#include <string.h>

#include "message.h"
#include "ulysses.h"

enum { MAX_TENSORS = 32, MAX_AXES = 8 };

// One list of tensors and the views of it that a callback sees.
typedef struct {
  const char *name;
  const ulysses_tensor *const *given; // NULL = the list is absent
  const int32_t *dim;
  int32_t n;
  ulysses_tensor view[MAX_TENSORS];
  int64_t shape[MAX_TENSORS][MAX_AXES], strides[MAX_TENSORS][MAX_AXES];
  const ulysses_tensor *shown[MAX_TENSORS];
} list;

static int32_t axis_of(const list *l, int i) { return l->dim ? l->dim[i] : 0; }

// prepare checks a list, finds the rows n that its cut tensors have in common, and writes strides
// out.
static ulysses_status prepare(const char *op, list *l, int optional, int64_t *rows) {
  for (int i = 0; i < l->n; i++) {
    const ulysses_tensor *t = l->given ? l->given[i] : NULL;
    l->shown[i] = NULL;
    if (!t) {
      if (optional) continue;
      return uly_fail(ULYSSES_INVALID_ARGUMENT,
                      "%s: tensor %lld of a list of %lld that must be given is NULL", op, i, l->n);
    }
    if (t->ndim < 0 || t->ndim > MAX_AXES || (t->ndim > 0 && !t->shape))
      return uly_fail(ULYSSES_INVALID_ARGUMENT,
                      "%s: tensor %lld has %lld axes: 0 to 8, and a shape", op, i, t->ndim);
    int32_t d = axis_of(l, i);
    if (d < -1 || d >= t->ndim)
      return uly_fail(
          ULYSSES_INVALID_ARGUMENT,
          "%s: tensor %lld is to be cut along axis %lld, which it has not: -1 passes it whole", op,
          i, d);
    int64_t step = 1;
    for (int k = t->ndim - 1; k >= 0; k--) {
      if (t->shape[k] < 0)
        return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: tensor %lld has a negative extent, %lld", op,
                        i, t->shape[k]);
      l->shape[i][k] = t->shape[k];
      l->strides[i][k] = t->strides ? t->strides[k] : step;
      if (t->shape[k] > 0) {
        if (step > INT64_MAX / 64 / t->shape[k])
          return uly_fail(ULYSSES_INVALID_ARGUMENT,
                          "%s: tensor %lld has too many elements (axis of %lld)", op, i,
                          t->shape[k]);
        step *= t->shape[k];
      }
    }
    if (d >= 0) {
      if (*rows < 0) *rows = t->shape[d];
      if (t->shape[d] != *rows)
        return uly_fail(ULYSSES_INVALID_ARGUMENT,
                        "%s: tensors that are cut have %lld and %lld rows: they must have as many",
                        op, *rows, t->shape[d]);
    }
    l->view[i] = *t;
    l->view[i].shape = l->shape[i];
    l->view[i].strides = l->strides[i];
    l->shown[i] = &l->view[i];
  }
  return ULYSSES_OK;
}

// cut moves the views of a list to rows [lo, hi).
static void cut(list *l, int64_t lo, int64_t hi) {
  for (int i = 0; i < l->n; i++) {
    int32_t d = axis_of(l, i);
    if (!l->shown[i] || d < 0) continue;
    int64_t bits = (int64_t)l->given[i]->bits * l->given[i]->lanes;
    l->shape[i][d] = hi - lo;
    l->view[i].byte_offset =
        l->given[i]->byte_offset + (uint64_t)(hi > lo ? lo * l->strides[i][d] * bits / 8 : 0);
  }
}

static ulysses_status read_args(const char *op, const ulysses_tiled_args *p,
                                ulysses_tiled_args *a) {
  if (!p) return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: args is NULL%.0lld%.0lld", op, 0, 0);
  uint32_t given = p->struct_size;
  if (given < 4 || given % 8 || given > 65536)
    return uly_fail(ULYSSES_INVALID_ARGUMENT,
                    "%s: args.struct_size is %lld, %lld here: use ULYSSES_INIT", op, given,
                    sizeof *a);
  for (uint32_t i = sizeof *a; i < given; i++)
    if (((const unsigned char *)p)[i])
      return uly_fail(ULYSSES_INVALID_ARGUMENT,
                      "%s: args.struct_size is %lld and byte %lld is not zero: a newer header's "
                      "field that this library lacks",
                      op, given, i);
  memset(a, 0, sizeof *a);
  memcpy(a, p, given < sizeof *a ? given : sizeof *a);
  if (a->n_in < 0 || a->n_in > MAX_TENSORS || a->n_out < 0 || a->n_out > MAX_TENSORS)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: n_in %lld, n_out %lld: 0 to 32 each", op,
                    a->n_in, a->n_out);
  if (a->reserved)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: args.reserved is %lld%.0lld: leave it 0", op,
                    a->reserved, 0);
  if (a->tile_rows < 0 || a->max_rows < 0)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: tile_rows %lld, max_rows %lld: 0 or more", op,
                    a->tile_rows, a->max_rows);
  if (a->n_in > 0 && !a->in)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: in is NULL and n_in is %lld%.0lld", op, a->n_in,
                    0);
  return ULYSSES_OK;
}

// plan settles the tiles: as many on every rank whose max_rows is the same.
static ulysses_status plan(const char *op, const ulysses_tiled_args *a, int64_t n, ulysses_tile *t,
                           int64_t *step) {
  int64_t max_rows = a->max_rows ? a->max_rows : n;
  if (n < 0)
    return uly_fail(ULYSSES_INVALID_ARGUMENT,
                    "%s: no tensor is cut, so there are no rows to walk: cut one%.0lld%.0lld", op,
                    0, 0);
  if (max_rows < n)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: max_rows %lld is below this rank's %lld rows",
                    op, max_rows, n);
  memset(t, 0, sizeof *t);
  t->struct_size = sizeof *t;
  t->stream = a->stream;
  t->count = a->tile_rows && max_rows ? (max_rows - 1) / a->tile_rows + 1 : 1;
  *step = n ? (n - 1) / t->count + 1 : 0;
  return ULYSSES_OK;
}

static int64_t low(int64_t a, int64_t b) { return a < b ? a : b; }

// bounds is [lo, hi) of tile i; i * step may pass any end, so it is not multiplied out beyond n.
static void bounds(ulysses_tile *t, int64_t i, int64_t step, int64_t n) {
  t->index = i;
  t->lo = step && i > n / step ? n : low(i * step, n);
  t->hi = low(t->lo + step, n);
}

API ulysses_status tiled_compute(const ulysses_tiled_args *p) {
  static const char op[] = "tiled_compute";
  ulysses_tiled_args a;
  ulysses_tile t;
  int64_t n = -1, step;
  uly_fresh();
  ulysses_status s = read_args(op, p, &a);
  if (s) return s;
  if (!a.forward)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: forward is NULL%.0lld%.0lld", op, 0, 0);
  if (a.n_out > 0 && !a.out)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: out is NULL and n_out is %lld%.0lld", op,
                    a.n_out, 0);
  list in = {.given = a.in, .dim = a.in_dim, .n = a.n_in},
       out = {.given = (const ulysses_tensor *const *)a.out, .dim = a.out_dim, .n = a.n_out};
  if ((s = prepare(op, &in, 0, &n)) || (s = prepare(op, &out, 0, &n)) ||
      (s = plan(op, &a, n, &t, &step)))
    return s;
  for (int64_t i = 0; i < t.count; i++) {
    bounds(&t, i, step, n);
    cut(&in, t.lo, t.hi);
    cut(&out, t.lo, t.hi);
    if ((s = a.forward(a.user, &t, in.shown, (ulysses_tensor *const *)out.shown)))
      return uly_stopped(s, op, i, t.count);
  }
  return ULYSSES_OK;
}

API ulysses_status tiled_compute_backward(const ulysses_tiled_args *p) {
  static const char op[] = "tiled_compute_backward";
  ulysses_tiled_args a;
  ulysses_tile t;
  int64_t n = -1, step;
  uly_fresh();
  ulysses_status s = read_args(op, p, &a);
  if (s) return s;
  if (!a.backward)
    return uly_fail(ULYSSES_INVALID_ARGUMENT, "%s: backward is NULL%.0lld%.0lld", op, 0, 0);
  list in = {.given = a.in, .dim = a.in_dim, .n = a.n_in},
       dout = {.given = a.dout, .dim = a.out_dim, .n = a.n_out},
       din = {.given = (const ulysses_tensor *const *)a.din, .dim = a.in_dim, .n = a.n_in};
  if ((s = prepare(op, &in, 0, &n)) || (s = prepare(op, &dout, 1, &n)) ||
      (s = prepare(op, &din, 1, &n)) || (s = plan(op, &a, n, &t, &step)))
    return s;
  for (int64_t i = 0; i < t.count; i++) {
    bounds(&t, i, step, n);
    cut(&in, t.lo, t.hi);
    cut(&dout, t.lo, t.hi);
    cut(&din, t.lo, t.hi);
    if ((s = a.backward(a.user, &t, in.shown, dout.shown, (ulysses_tensor *const *)din.shown)))
      return uly_stopped(s, op, i, t.count);
  }
  return ULYSSES_OK;
}
