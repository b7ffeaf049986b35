// Sets of tensors with a rank's rows. Their values depend on the position in the whole sequence, so
// a rank's rows can be compared with the results of one rank alone.
#include "host.h"

// A set of tensors [B, rows, heads, features] of rows [lo, hi), or of keys [klo, khi). row is the
// elements of a row and from the first row of each tensor.
enum { MOST = 16 };
#define CLOSE 2e-5 // relative to the largest value: the tolerance of F32
typedef struct {
  int64_t lo, hi, klo, khi;
  int n;
  float *x[MOST];
  int64_t shape[MOST][4], row[MOST], from[MOST];
  ulysses_tensor t[MOST];
} set;

// add adds a tensor with rows [lo, hi) of seq to a set, and fills it with `number`.
static inline ulysses_tensor *add(set *s, int64_t lo, int64_t hi, int64_t seq, int64_t heads,
                                  int64_t d) {
  int i = s->n++;
  CHECK(i < MOST);
  int64_t shape[4] = {B, hi - lo, heads, d}, row = heads * d;
  memcpy(s->shape[i], shape, sizeof shape);
  s->row[i] = row, s->from[i] = lo, s->x[i] = allocate((uint64_t)(B * (hi - lo) * row) * 4);
  for (int64_t b = 0; b < B; b++)
    for (int64_t k = 0; k < (hi - lo) * row; k++)
      s->x[i][b * (hi - lo) * row + k] = number(i, (b * seq + lo) * row + k);
  s->t[i] = floats(s->x[i], s->shape[i]);
  return &s->t[i];
}

// free_set frees the tensors of a set.
static inline void free_set(set *s) {
  for (int i = 0; i < s->n; i++) free(s->x[i]);
}

// near compares tensor i of a rank with its rows of the whole tensor. limit is the largest allowed
// difference relative to the largest value; 0 = bitwise equal.
static inline void near(const char *what, const set *part, const set *whole, int i, double limit) {
  int64_t n = part->shape[i][1], all = whole->shape[i][1], row = part->row[i];
  double most = 0, off = 0;
  for (int64_t k = 0; k < B * all * row; k++) most = fmax(most, fabs((double)whole->x[i][k]));
  for (int64_t b = 0; b < B; b++)
    for (int64_t k = 0; k < n * row; k++) {
      float x = part->x[i][b * n * row + k], y = whole->x[i][(b * all + part->from[i]) * row + k];
      if (limit > 0 ? !(fabs((double)x - (double)y) <= limit * most) : memcmp(&x, &y, 4) != 0) {
        fprintf(stderr,
                "%s: tensor %d, sequence %d, element %d of the rows from %d: %.9g, but %.9g on "
                "one rank\n",
                what, i, (int)b, (int)k, (int)part->from[i], (double)x, (double)y);
        exit(9);
      }
      off = fmax(off, fabs((double)x - (double)y));
    }
  CHECK(most > 1e-3); // the results are not all zero
}
