// Argument checks that RMSNorm and the gated RMSNorm share.
#pragma once

#include "check.h"

// check_norm checks x, w and rstd. x has the type `type` and at least one axis; messages call it
// `name`. w is [N] of that type; rstd is F32 with one element for each row of x.
inline void check_norm(Check &c, int type, const char *name, const uly_tensor &x, const uly_tensor &w,
                       const uly_tensor &rstd) {
  const uly_tensor *operand = &x;
  const int64_t n = x.shape[x.ndim - 1], rows = Rows(&operand, 1).rows;
  c.rows(name, x, type, Shape(x));
  c.dense("w", w, type, {n});
  c.dense("rstd", rstd, ULY_F32, Shape(rstd));
  if (elements(rstd) != rows) c.refuse("rstd is %s: want %lld elements", text_of(rstd).c_str(), (long long)rows);
  if (n == 0) c.refuse("%s is %s: there are no features", name, text_of(x).c_str());
}
