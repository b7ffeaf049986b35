// fuzz_tiled.c SECONDS: calls tiled_compute and its backward pass with valid arguments in which up
// to three values are then made invalid. It is built with tiled.c and the compiler's sanitizers.
// Every array has allocate the length that the arguments state, so an access beyond it is reported.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "message.h"
#include "ulysses.h"

// Replaces thread.c.
static char message[512];
ulysses_status uly_fail(ulysses_status code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  return code;
}
ulysses_status uly_callback_failed(ulysses_status code, const char *op, long long tile,
                                   long long tiles) {
  snprintf(message, sizeof message, "%s: tile %lld of %lld", op, tile, tiles);
  return code;
}
char *uly_clear_error(void) {
  message[0] = 0;
  return message;
}

static uint64_t state;
static int faults;  // invalid values that are still to be made
static int invalid; // the arguments may be invalid

// draw returns 64 random bits.
static uint64_t draw(void) {
  state += 0x9e3779b97f4a7c15ull;
  uint64_t x = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
// below returns a number of 0 to n - 1.
static int64_t below(int64_t n) { return (int64_t)(draw() % (uint64_t)n); }

// wrong returns 1 if the next value should be invalid.
static int wrong(void) { return faults > 0 && below(12) == 0 && faults-- > 0; }

// number returns the valid value, or sometimes another.
static int64_t number(int64_t valid) {
  if (!wrong()) return valid;
  switch (below(6)) {
    case 0: return valid + 1;
    case 1: return valid - 1;
    case 2: return -valid - 1;
    case 3: return (int64_t)1 << below(63);
    case 4: return -((int64_t)1 << below(63));
  }
  return (int64_t)draw();
}
#define CHECK(x)                                                           \
  do {                                                                     \
    if (!(x)) {                                                            \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, message); \
      exit(9);                                                             \
    }                                                                      \
  } while (0)

// allocate returns n zero bytes.
static void *allocate(size_t n) {
  void *p = malloc(n ? n : 1);
  CHECK(p);
  return memset(p, 0, n);
}

// A tensor and the extents and row stride of its memory. The fields of t may differ.
typedef struct {
  ulysses_tensor t;
  int64_t rows, width, stride;
} allocated;

static ulysses_tensor *tensor(int64_t rows, int64_t width) {
  if (wrong()) return NULL;
  allocated *m = allocate(sizeof *m);
  m->rows = rows, m->width = width, m->stride = width + below(3);
  int ndim = (int)number(2), has = ndim > 0 && ndim <= 8 ? ndim : 0;
  m->t.data = allocate((size_t)((rows ? (rows - 1) * m->stride + width : 0) * 4));
  m->t.device = 1, m->t.code = 2, m->t.bits = 32, m->t.lanes = 1, m->t.ndim = ndim;
  m->t.shape = allocate((size_t)has * 8), m->t.strides = allocate((size_t)has * 8);
  for (int i = 0; i < has; i++)
    m->t.shape[i] = number(i ? width : rows), m->t.strides[i] = i ? 1 : m->stride;
  if (wrong()) free(m->t.shape), m->t.shape = NULL;
  if (m->stride == width && below(2)) free(m->t.strides), m->t.strides = NULL;
  return &m->t;
}
static void release(ulysses_tensor *t) {
  if (t) free(t->data), free(t->shape), free(t->strides), free(t);
}

enum { MAX_LIST = 3 };

// What the callbacks of one call have seen so far.
typedef struct {
  int64_t calls, last, rows, stop;
  const ulysses_tiled_args *a;
} walk;

// older is 1 if struct_size is smaller than the struct: lists of axes and the callback's `user` may
// then be missing, so the callbacks check no views and find their walk in `current`.
static int older;
static walk *current;

// touch checks a view against its tensor, if the tensor's fields match its memory, and reads or
// writes all elements.
static void touch(const ulysses_tensor *view, const ulysses_tensor *whole, int32_t dim, int64_t lo,
                  int64_t hi, int write) {
  if (older) return;
  const allocated *m = (const allocated *)(const void *)whole;
  if (!view) {
    CHECK(!whole);
    return;
  }
  if (whole->ndim != 2 || whole->shape[0] != m->rows || whole->shape[1] != m->width) return;
  CHECK(view->ndim == 2 && view->strides && dim < 2 &&
        view->shape[0] == (dim == 0 ? hi - lo : m->rows) &&
        view->shape[1] == (dim == 1 ? hi - lo : m->width));
  CHECK(dim < 0 || (lo >= 0 && lo <= hi && hi <= (dim ? m->width : m->rows)));
  for (int64_t i = 0; i < view->shape[0]; i++)
    for (int64_t k = 0; k < view->shape[1]; k++) {
      float *x = (float *)(void *)((char *)view->data + view->byte_offset) + i * view->strides[0] +
                 k * view->strides[1];
      if (write) *x += 1;
      else CHECK(*x == 0);
    }
}

// count_tile checks that the tiles come in order. It returns an error after `stop` tiles.
static ulysses_status count_tile(walk *w, const ulysses_tile *t) {
  CHECK(t->index == w->calls && t->count > 0 && t->lo <= t->hi && t->lo == w->rows);
  w->calls++, w->rows = t->hi, w->last = t->index == t->count - 1;
  return w->calls > w->stop ? ULYSSES_NUMERIC : ULYSSES_OK;
}
static ulysses_status forward(void *user, const ulysses_tile *t, const ulysses_tensor *const *in,
                              ulysses_tensor *const *out) {
  walk *w = older ? current : user;
  for (int i = 0; i < w->a->n_in; i++)
    touch(in[i], w->a->in[i], w->a->in_dim ? w->a->in_dim[i] : 0, t->lo, t->hi, 0);
  for (int i = 0; i < w->a->n_out; i++)
    touch(out[i], w->a->out[i], w->a->out_dim ? w->a->out_dim[i] : 0, t->lo, t->hi, 1);
  return count_tile(w, t);
}
static ulysses_status backward(void *user, const ulysses_tile *t, const ulysses_tensor *const *in,
                               const ulysses_tensor *const *dout, ulysses_tensor *const *din) {
  walk *w = older ? current : user;
  for (int i = 0; i < w->a->n_in; i++) {
    touch(in[i], w->a->in[i], w->a->in_dim ? w->a->in_dim[i] : 0, t->lo, t->hi, 0);
    touch(din[i], w->a->din ? w->a->din[i] : NULL, w->a->in_dim ? w->a->in_dim[i] : 0, t->lo, t->hi,
          1);
  }
  for (int i = 0; i < w->a->n_out; i++)
    touch(dout[i], w->a->dout ? w->a->dout[i] : NULL, w->a->out_dim ? w->a->out_dim[i] : 0, t->lo,
          t->hi, 0);
  return count_tile(w, t);
}

// once makes both calls with the arguments of a seed.
static void once(uint64_t seed) {
  state = seed, faults = (int)below(4), invalid = faults > 0;
  int64_t rows = below(9), none = invalid && below(20) == 0;
  int n_in = 1 + (int)below(MAX_LIST), n_out = (int)below(MAX_LIST + 1);
  ulysses_tensor **list[4]; // in, out, dout, din
  int32_t *dim[2] = {allocate((size_t)n_in * 4), allocate((size_t)n_out * 4)};
  for (int i = 0; i < n_in; i++) dim[0][i] = (int32_t)number(i && below(3) == 0 ? -1 : 0);
  for (int i = 0; i < n_out; i++) dim[1][i] = (int32_t)number(below(3) == 0 ? -1 : 0);
  for (int k = 0; k < 4; k++) {
    int n = k == 1 || k == 2 ? n_out : n_in;
    list[k] = allocate((size_t)n * sizeof(ulysses_tensor *));
    for (int i = 0; i < n; i++)
      list[k][i] =
          k > 1 && below(4) == 0 ? NULL : tensor(dim[k == 1 || k == 2][i] ? 2 : rows, 1 + below(3));
  }
  ulysses_tiled_args *a = allocate(sizeof *a);
  ULYSSES_INIT(a);
  a->n_in = (int32_t)number(n_in), a->n_out = (int32_t)number(n_out);
  // The library cannot know the length of a list, so a number above it is not drawn.
  if (a->n_in > n_in && a->n_in <= 32) a->n_in = n_in;
  if (a->n_out > n_out && a->n_out <= 32) a->n_out = n_out;
  a->in_dim = dim[0], a->out_dim = dim[1], a->tile_rows = number(below(12)),
  a->max_rows = number(below(2) ? 0 : rows + below(5));
  if (!invalid && a->max_rows && a->max_rows < rows) a->max_rows = rows;
  a->in = none ? NULL : (const ulysses_tensor *const *)list[0], a->out = list[1],
  a->dout = (const ulysses_tensor *const *)list[2], a->din = list[3];
  if (wrong()) a->struct_size = (uint32_t)below(sizeof *a + 1);
  if (wrong()) a->reserved = (int32_t)below(2);
  a->forward = wrong() ? NULL : forward, a->backward = wrong() ? NULL : backward;
  older = a->struct_size < sizeof *a;
  for (int pass = 0; pass < 2; pass++) {
    walk w = {0, 0, 0, 64, a};
    a->user = current = &w;
    ulysses_status s = pass ? tiled_compute_backward(a) : tiled_compute(a);
    CHECK(invalid || s == ULYSSES_OK);
    CHECK(s == ULYSSES_OK || message[0]);
    if (s == ULYSSES_OK && a->struct_size == sizeof *a) CHECK(w.last && w.calls <= 64);
  }
  for (int k = 0; k < 4; k++) {
    for (int i = 0; i < (k == 1 || k == 2 ? n_out : n_in); i++) release(list[k][i]);
    free(list[k]);
  }
  free(dim[0]), free(dim[1]), free(a);
}

int main(int argc, char **argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 1;
  clock_t end = clock() + (clock_t)(seconds * CLOCKS_PER_SEC);
  uint64_t n = 0;
  do once(n++);
  while (n < 20000 || clock() < end);
  printf("ok: %llu seeds\n", (unsigned long long)n);
  return 0;
}
