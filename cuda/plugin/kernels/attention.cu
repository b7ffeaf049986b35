// Attention: softmax(scale · q · kᵀ) · v for each head and document, for q [Tq, Hq, D], k [Tk, Hkv,
// D], v [Tk, Hkv, Dv] and out [Tq, Hq, Dv]. lse [Tq, Hq], in F32, is for the backward pass. This
// file checks arguments, computes workspaces and launches the kernels of attention_forward.cu,
// attention_backward.cu and attention_mma.cu. libraries/sdpa.cpp registers cuDNN.
#include "attention.h"

#include <float.h>
#include <math.h>

#include "check.h"
#include "tables.h"
#include "values.h"
#include "libraries/libraries.h"

int32_t attention_upload(uly_device *d, uly_stream *s, const uly_attention *a, const AttentionLayout &l, int64_t tile_q,
                         int64_t tile_k) {
  Tables tables(d, s, "Attention: tables of documents", a->workspace.data);
  attention_tables(*a, l, tile_q, tile_k, [&](int64_t at, int64_t value) { tables(at, value); });
  return tables.end();
}

static bool mma_fits(uly_device *d, const AttentionArgs &a);

// mma_adds reports whether the blocks of the mma kernel add to dq in any order. This takes five
// products instead of seven, and its results are not reproducible. The gradient of slopes is
// computed by the dq kernel.
static bool mma_adds(uly_device *d, const AttentionArgs &a) {
  return a.backward && !d->deterministic && !a.deterministic && a.slopes.dtype == 0 && mma_fits(d, a);
}

static int64_t workspace_bytes(uly_device *d, const AttentionArgs &a) {
  const AttentionLayout l = attention_layout(a, a.backward, mma_adds(d, a));
  if (sdpa_fits(d, a)) return most(l.bytes, l.tables + ceil_div(sdpa_workspace(d, a), 256) * 256);
  return l.bytes;
}

int64_t attention_workspace(uly_device *d, const uly_attention *a, bool backward) {
  return workspace_bytes(d, attention_args(*a, backward));
}

static bool given(const uly_tensor &t) { return t.dtype != 0; }

// check_blocks requires a block mask of the shape that the lengths of a sequence and of the blocks
// give, and documents that lie inside a sequence.
static void check_blocks(Check &c, const AttentionArgs &a) {
  if (a.query_seq < 1 || a.key_seq < 1 || a.block_rows < 1 || a.block_columns < 1 || a.query_at < 0 || a.key_at < 0)
    return c.refuse(
        "BlockMask with sequences of %lld queries and %lld keys, from %lld and %lld on, in blocks of %lld "
        "by %lld; QuerySeq, KeySeq, BlockRows and BlockColumns must be at least 1, QueryAt and KeyAt at "
        "least 0",
        (long long)a.query_seq, (long long)a.key_seq, (long long)a.query_at, (long long)a.key_at,
        (long long)a.block_rows, (long long)a.block_columns);
  const int64_t heads = a.block_mask.ndim == 3 && a.block_mask.shape[0] == 1 ? 1 : a.q.shape[1];
  c.dense("BlockMask", a.block_mask, ULY_U8,
          {heads, ceil_div(a.query_seq, a.block_rows), ceil_div(a.key_seq, a.block_columns)});
  auto inside = [&](const char *name, const uly_list &cu, int64_t at, int64_t seq) {
    for (int64_t i = 0; !c.failed() && i < cu.documents(); i++)
      if (cu[i + 1] > cu[i] && (at + cu[i]) % seq + cu[i + 1] - cu[i] > seq)
        c.refuse(
            "%s: rows %lld to %lld of document %lld cross the end of a sequence of %lld tokens; with BlockMask, "
            "a document lies inside a sequence",
            name, (long long)(at + cu[i]), (long long)(at + cu[i + 1] - 1), (long long)i, (long long)seq);
  };
  inside("CuQ", a.cu_q, a.query_at, a.query_seq);
  inside("CuK", a.cu_k, a.key_at, a.key_seq);
}

// check_options checks the arguments that change or hide scores.
static void check_options(Check &c, const AttentionArgs &a) {
  const int64_t hq = a.q.shape[1];
  if (given(a.sinks)) c.dense("sinks", a.sinks, ULY_F32, {hq});
  if (given(a.slopes)) c.dense("slopes", a.slopes, ULY_F32, {hq});
  if (given(a.sinks) && a.carry && !a.backward)
    c.refuse("Sinks and Carry are set; the softmax that is carried has the sinks, set one of the two");
  if (given(a.dsinks)) c.dense("dsinks", a.dsinks, ULY_F32, {hq});
  if (given(a.dslopes)) c.dense("dslopes", a.dslopes, ULY_F32, {hq});
  if ((given(a.dsinks) && !given(a.sinks)) || (given(a.dslopes) && !given(a.slopes)))
    c.refuse("DSinks needs Sinks, and DSlopes needs Slopes; give these, or no gradient of them");
  if (!(a.softcap >= 0 && a.softcap <= FLT_MAX))
    c.refuse("Softcap is %g; it must be positive, or 0 for scores without a cap", a.softcap);
  if (!(a.dropout >= 0 && a.dropout < 1)) c.refuse("Dropout is %g; it must be in [0, 1)", a.dropout);
  if (a.shift && a.shift.length != a.cu_q.documents())
    c.refuse("Shift has %lld entries for %lld documents; give one for each document", (long long)a.shift.length,
             (long long)a.cu_q.documents());
  for (int64_t i = 0; !c.failed() && i < a.shift.length; i++)
    if (a.shift[i] < -ATTENTION_SHIFT || a.shift[i] > ATTENTION_SHIFT)
      c.refuse("Shift[%lld] is %lld; it must be at most 2^50 in magnitude", (long long)i, (long long)a.shift[i]);
  if (given(a.block_mask)) check_blocks(c, a);
}

int32_t attention_check(uly_device *d, const AttentionArgs &a) {
  Check c(d, a.backward ? "AttentionBackward" : "AttentionForward");
  if (a.q.ndim != 3 || a.k.ndim != 3 || a.v.ndim != 3) {
    c.refuse("q is %s, k %s, v %s: want [tokens, heads, features]", text_of(a.q).c_str(), text_of(a.k).c_str(),
             text_of(a.v).c_str());
    return c.code;
  }
  const int type = c.compute("q", a.q);
  const int64_t tq = a.q.shape[0], hq = a.q.shape[1], dim = a.q.shape[2], tk = a.k.shape[0], hkv = a.k.shape[1],
                dv = a.v.shape[2];
  c.rows("q", a.q, type, {-1, -1, -1});
  c.rows("k", a.k, type, {-1, -1, dim});
  c.rows("v", a.v, type, {tk, hkv, -1});
  const bool wide = a.carry || (a.backward && a.out.dtype == ULY_F32);
  c.rows("out", a.out, wide ? ULY_F32 : type, {tq, hq, dv});
  c.shape("lse", a.lse, ULY_F32, {tq, hq});
  if (dim < 1 || dv < 1) c.refuse("head sizes %lld and %lld: they must be at least 1", (long long)dim, (long long)dv);
  c.documents("CuQ", a.cu_q, tq);
  c.documents("CuK", a.cu_k, tk);
  if (!a.kv_head && hq > 0 && (hkv == 0 || hq % hkv != 0))
    c.refuse("%lld query heads for %lld key heads: KVHead is required, because the number does not divide",
             (long long)hq, (long long)hkv);
  for (int64_t h = 0; a.kv_head && h < hq; h++)
    if (a.kv_head[h] < (h ? a.kv_head[h - 1] : 0) || a.kv_head[h] >= hkv) {
      c.refuse("KVHead[%lld] = %lld: KVHead must not decrease and must be below %lld", (long long)h,
               (long long)a.kv_head[h], (long long)hkv);
      break;
    }
  check_options(c, a);
  if (a.backward) {
    const int grad = a.dq.dtype == ULY_F32 ? ULY_F32 : type;
    c.rows("dout", a.dout, type, {tq, hq, dv});
    c.rows("dq", a.dq, grad, {tq, hq, dim});
    c.rows("dk", a.dk, grad, {tk, hkv, dim});
    c.rows("dv", a.dv, grad, {tk, hkv, dv});
  }
  if (c.failed()) return c.code;
  const int64_t bytes = workspace_bytes(d, a);
  c.dense("workspace", a.workspace, ULY_U8, {-1});
  if (!c.failed() && a.workspace.shape[0] < bytes)
    c.refuse("workspace %s: AttentionWorkspace requires %lld bytes", text_of(a.workspace).c_str(), (long long)bytes);
  if (!c.failed() && (uintptr_t)a.workspace.data % 256 != 0)
    c.refuse("workspace at %p: it must be aligned to 256 bytes", a.workspace.data);
  return c.code;
}

static AttentionView view(const uly_tensor &t) {
  const bool bf16 = t.dtype == ULY_BF16;
  const bool wide =
      t.shape[2] % 4 == 0 && t.stride[0] % 4 == 0 && t.stride[1] % 4 == 0 && (uintptr_t)t.data % (bf16 ? 8 : 16) == 0;
  return {t.data,
          t.stride[0],
          t.stride[1],
          (int32_t)t.shape[2],
          bf16,
          wide,
          aligned16(t.data, bf16 ? 2 : 4, t.stride[0], t.stride[1])};
}

static AttentionCall call_of(const AttentionArgs &a, const AttentionLayout &l) {
  char *w = (char *)a.workspace.data;
  auto table = [&](int64_t at) { return (const int64_t *)(w + at); };
  AttentionCall c = {};
  c.q = view(a.q), c.k = view(a.k), c.v = view(a.v), c.out = view(a.out);
  c.lse = (float *)a.lse.data, c.lse_token = a.lse.stride[0], c.lse_head = a.lse.stride[1];
  c.heads = a.q.shape[1], c.kv_heads = a.k.shape[1], c.queries = a.q.shape[0], c.keys = a.k.shape[0];
  c.documents = l.documents;
  c.cu_q = table(l.cu_q), c.cu_k = table(l.cu_k), c.tiles_q = table(l.tiles_q), c.tiles_k = table(l.tiles_k);
  c.shift = table(l.shift), c.kv_head = table(l.kv_head), c.first = table(l.first);
  c.mask = attention_mask(a);
  c.scale = (float)a.scale;
  c.sinks = (const float *)a.sinks.data, c.carry = a.carry;
  AttentionScores &o = c.scores;
  o.cap = (float)a.softcap, o.per_cap = a.softcap != 0 ? (float)(1 / a.softcap) : 0;
  o.slopes = (const float *)a.slopes.data;
  o.drop = drop_of(a.dropout), o.kept = kept_of(a.dropout);
  o.seed = (uint64_t)a.seed, o.head_at = a.head_at, o.query_at = a.query_at, o.key_at = a.key_at;
  if (given(a.block_mask)) {
    o.blocks = (const uint8_t *)a.block_mask.data;
    o.blocks_row = a.block_mask.shape[2];
    o.blocks_head = a.block_mask.shape[0] == 1 ? 0 : a.block_mask.shape[1] * o.blocks_row;
    o.query_seq = a.query_seq, o.key_seq = a.key_seq;
    o.block_rows = a.block_rows, o.block_columns = a.block_columns;
  }
  if (a.backward) {
    c.dout = view(a.dout), c.dq = view(a.dq), c.dk = view(a.dk), c.dv = view(a.dv);
    c.delta = (float *)(w + l.delta), c.sums = (float *)(w + l.sums);
    c.dsinks = (float *)a.dsinks.data, c.dslopes = (float *)a.dslopes.data;
    c.terms = c.dslopes ? (float *)(w + l.terms) : nullptr;
  }
  return c;
}

// Kernels are the kernels for a part of a call, by head size. `configured` is for allow_shared.
struct Kernels {
  const AttentionKernel *of_size;
  std::atomic<uint64_t> configured[ATTENTION_SIZES] = {};
};

// VariantKernels has the kernels of a variant: first those for calls without options of scores,
// then the scored ones. `begun` is for a softmax that begins with sinks or a carry; `adding`
// computes dk and dv and adds to dq (mma_adds). `threads` is the size of a block, except for dk and
// dv (Tiles).
struct VariantKernels {
  int threads;
  Kernels forward[2], begun[2], dq[2], dkv[2], adding[2];
};
enum Variant { OWN, SMALL, MMA, WGMMA };
static VariantKernels &kernels_of(Variant variant) {
  static VariantKernels own = {ATTENTION_THREADS,
                               {{attention_forward_kernels}, {attention_scored_forward_kernels}},
                               {{attention_forward_kernels}, {attention_scored_forward_kernels}},
                               {{attention_dq_kernels}, {attention_scored_dq_kernels}},
                               {{attention_dkv_kernels}, {attention_scored_dkv_kernels}},
                               {}};
  static VariantKernels mma = {ATTENTION_MMA_THREADS,
                               {{attention_mma_forward_kernels}, {attention_mma_scored_forward_kernels}},
                               {{attention_mma_begun_kernels}, {attention_mma_scored_forward_kernels}},
                               {{attention_mma_dq_kernels}, {attention_mma_scored_dq_kernels}},
                               {{attention_mma_dkv_kernels}, {attention_mma_scored_dkv_kernels}},
                               {{attention_mma_gradient_kernels}, {attention_mma_scored_gradient_kernels}}};
  static VariantKernels wgmma = {ATTENTION_WGMMA_THREADS,           {{attention_wgmma_forward_kernels}},
                                 {{attention_wgmma_begun_kernels}}, {{attention_wgmma_dq_kernels}},
                                 {{attention_wgmma_dkv_kernels}},   {}};
  return variant == MMA ? mma : variant == WGMMA ? wgmma : own;
}
static Kernels wgmma_delta_kernels = {attention_wgmma_delta_kernels};

// Tiles has the tile sizes of a call, their index in the table of the variant, and the bytes of
// shared memory. back_threads is the number of threads of the dk and dv kernel.
struct Tiles {
  int64_t index;
  int rows, columns, back_queries, back_keys, back_threads;
  int64_t forward_shared, dq_shared, dkv_shared;
};
static Tiles tiles_of(int64_t dim, int64_t dv, Variant variant, bool scored) {
  if (variant == MMA) {
    const AttentionMmaSize &s = attention_mma_size(dim, dv);
    return {&s - attention_mma_sizes,
            s.rows,
            s.columns,
            s.dq_rows,
            ATTENTION_MMA_BACK,
            32 * s.warps,
            attention_mma_shared(s, scored),
            attention_mma_dq_shared(s, scored),
            attention_mma_dkv_shared(s, scored)};
  }
  if (variant == WGMMA) {
    const AttentionWgmmaSize &s = attention_wgmma_sizes[&attention_mma_size(dim, dv) - attention_mma_sizes];
    const int64_t back = attention_wgmma_back_shared(s);
    return {&s - attention_wgmma_sizes,
            ATTENTION_WGMMA_ROWS,
            s.columns,
            ATTENTION_WGMMA_ROWS,
            ATTENTION_WGMMA_ROWS,
            ATTENTION_WGMMA_THREADS,
            attention_wgmma_shared(s),
            back,
            back};
  }
  const AttentionSize &s = attention_size(dim, dv, variant == SMALL);
  const int64_t backward = attention_shared(s, true, scored);
  return {&s - attention_sizes,
          s.rows,
          s.columns,
          s.back_rows,
          s.back_rows,
          ATTENTION_THREADS,
          attention_shared(s, false, scored),
          backward,
          backward};
}

// scored reports whether a call needs the scored kernels.
static bool scored(const uly_attention &a) {
  return given(a.slopes) || given(a.block_mask) || a.softcap != 0 || a.dropout != 0;
}

// launch launches a kernel for `work` items.
static int32_t launch(uly_device *d, uly_stream *s, const char *what, Kernels &kernels, int64_t index, int threads,
                      int64_t shared, int64_t work, const AttentionCall &call) {
  if (work == 0) return ULY_OK;
  TRY(allow_shared(d, (const void *)kernels.of_size[index], shared, kernels.configured[index], what));
  LAUNCH(kernels.of_size[index], (unsigned)least(work, GRID_LIMIT), threads, (size_t)shared, s, call);
  return check_launch(d, what);
}

static int32_t forward(uly_device *d, uly_stream *s, const void *args, Variant variant) {
  const AttentionArgs a = attention_args(args, false);
  const char *op = "AttentionForward";
  TRY(attention_check(d, a));
  const Tiles tiles = tiles_of(a.q.shape[2], a.v.shape[2], variant, scored(a));
  const AttentionLayout l = attention_layout(a, false, false);
  AttentionCall c = call_of(a, l);
  c.count_q = attention_count(a.cu_q, a.cu_q.documents(), tiles.rows);
  if (c.heads * c.count_q == 0) return ULY_OK;
  TRY(attention_upload(d, s, &a, l, tiles.rows, tiles.columns));
  VariantKernels &kernels = kernels_of(variant);
  Kernels *forward = a.carry || given(a.sinks) ? kernels.begun : kernels.forward;
  return launch(d, s, op, forward[scored(a)], tiles.index, kernels.threads, tiles.forward_shared, c.heads * c.count_q,
                c);
}

// delta launches the kernel that writes delta, on tensor cores if the others compute dP there.
static int32_t delta(uly_device *d, uly_stream *s, Variant variant, int64_t index, const AttentionCall &c) {
  const char *op = "AttentionBackward";
  if (variant == WGMMA && c.out.bf16)
    return launch(d, s, op, wgmma_delta_kernels, index, 128, attention_wgmma_delta_shared(attention_wgmma_sizes[index]),
                  c.heads * ceil_div(c.queries, 64), c);
  if (variant == MMA && c.out.bf16) {
    const int64_t strips = c.heads * ceil_div(c.queries, 16);
    LAUNCH(attention_mma_delta, (unsigned)least(ceil_div(strips, ATTENTION_MMA_THREADS / 32), GRID_LIMIT),
           ATTENTION_MMA_THREADS, 0, s, c);
    return check_launch(d, op);
  }
  LAUNCH(attention_delta, (unsigned)least(ceil_div(c.heads * c.queries, ATTENTION_THREADS), GRID_LIMIT),
         ATTENTION_THREADS, 0, s, c);
  return check_launch(d, op);
}

static int32_t backward(uly_device *d, uly_stream *s, const void *args, Variant variant) {
  const AttentionArgs a = attention_args(args, true);
  const char *op = "AttentionBackward";
  TRY(attention_check(d, a));
  const Tiles tiles = tiles_of(a.q.shape[2], a.v.shape[2], variant, scored(a));
  const bool adds = variant == MMA && mma_adds(d, a), sums = a.q.shape[1] > 0 && (given(a.dsinks) || given(a.dslopes));
  const AttentionLayout l = attention_layout(a, true, adds);
  AttentionCall c = call_of(a, l);
  c.count_q = attention_count(a.cu_q, a.cu_q.documents(), tiles.back_queries);
  c.count_k = attention_count(a.cu_k, a.cu_k.documents(), tiles.back_keys);
  if (adds) c.dq_sums = (float *)((char *)a.workspace.data + l.dq_sums);
  const int64_t rows = c.heads * c.queries;
  if (rows + c.kv_heads * c.keys == 0 && !sums) return ULY_OK;
  TRY(attention_upload(d, s, &a, l, tiles.back_queries, tiles.back_keys));
  if (rows > 0) TRY(delta(d, s, variant, tiles.index, c));
  if (adds && rows > 0) TRY(check(d, cudaMemsetAsync(c.dq_sums, 0, (size_t)(4 * rows * c.dq.width), s->s), op));
  VariantKernels &kernels = kernels_of(variant);
  TRY(launch(d, s, op, (adds ? kernels.adding : kernels.dkv)[scored(a)], tiles.index, tiles.back_threads,
             tiles.dkv_shared, c.kv_heads * c.count_k, c));
  if (!adds) {
    TRY(launch(d, s, op, kernels.dq[scored(a)], tiles.index, kernels.threads, tiles.dq_shared, c.heads * c.count_q, c));
  } else if (rows > 0) {
    const int64_t blocks = ceil_div(rows * c.dq.width / 16, ATTENTION_MMA_THREADS);
    LAUNCH(attention_mma_dq_finish, (unsigned)least(blocks, GRID_LIMIT), ATTENTION_MMA_THREADS, 0, s, c);
    TRY(check_launch(d, op));
  }
  if (sums) { // after the terms of dslopes
    LAUNCH(attention_head_sums, (unsigned)least(2 * c.heads, GRID_LIMIT), ATTENTION_THREADS,
           ATTENTION_THREADS * sizeof(double), s, c);
    TRY(check_launch(d, op));
  }
  return ULY_OK;
}

static int32_t own_forward(uly_device *d, uly_stream *s, const void *a) { return forward(d, s, a, OWN); }
static int32_t small_forward(uly_device *d, uly_stream *s, const void *a) { return forward(d, s, a, SMALL); }
static int32_t mma_forward(uly_device *d, uly_stream *s, const void *a) { return forward(d, s, a, MMA); }
static int32_t wgmma_forward(uly_device *d, uly_stream *s, const void *a) { return forward(d, s, a, WGMMA); }
static int32_t own_backward(uly_device *d, uly_stream *s, const void *a) { return backward(d, s, a, OWN); }
static int32_t small_backward(uly_device *d, uly_stream *s, const void *a) { return backward(d, s, a, SMALL); }
static int32_t mma_backward(uly_device *d, uly_stream *s, const void *a) { return backward(d, s, a, MMA); }
static int32_t wgmma_backward(uly_device *d, uly_stream *s, const void *a) { return backward(d, s, a, WGMMA); }

// fits_shared reports whether there are kernels for these head sizes and the GPU has enough shared
// memory for their tiles. It accepts tensors of a wrong rank, which attention_check rejects with a
// message.
static bool fits_shared(uly_device *d, const uly_attention &a, Variant variant, bool backward) {
  if (a.q.ndim != 3 || a.v.ndim != 3) return true;
  const int64_t dim = a.q.shape[2], dv = a.v.shape[2];
  if (most(dim, dv) > ATTENTION_HEAD) {
    fail(d, ULY_UNSUPPORTED, "head sizes %lld and %lld: the plug-in's own kernels support at most %d", (long long)dim,
         (long long)dv, (int)ATTENTION_HEAD);
    return false;
  }
  const Tiles tiles = tiles_of(dim, dv, variant, scored(a));
  const int64_t bytes = backward ? most(tiles.dq_shared, tiles.dkv_shared) : tiles.forward_shared;
  if (bytes <= d->shared_limit) return true;
  fail(d, ULY_UNSUPPORTED, "head sizes %lld and %lld need %lld bytes of shared memory, the GPU has %d", (long long)dim,
       (long long)dv, (long long)bytes, d->shared_limit);
  return false;
}
static bool own_fits_forward(uly_device *d, const void *a) {
  return fits_shared(d, *(const uly_attention *)a, OWN, false);
}
static bool own_fits_backward(uly_device *d, const void *a) {
  return fits_shared(d, *(const uly_attention *)a, OWN, true);
}
static bool small_fits_forward(uly_device *d, const void *a) {
  return fits_shared(d, *(const uly_attention *)a, SMALL, false);
}
static bool small_fits_backward(uly_device *d, const void *a) {
  return fits_shared(d, *(const uly_attention *)a, SMALL, true);
}

// cores_fit depends on types, head sizes, scale and options only, which are equal on all ranks and
// for all layouts: the choice of the kernel must not change results. The kernels find the largest
// score of a row before scaling, so the scale must be positive.
static bool cores_fit(uly_device *d, const AttentionArgs &a, Variant variant) {
  const int64_t dim = a.q.shape[2], dv = a.v.shape[2];
  const char *why = nullptr;
  if (a.q.ndim != 3 || a.v.ndim != 3 || a.q.dtype != ULY_BF16) why = "a type is not BF16";
  else if (dim % 16 != 0 || dv % 16 != 0) why = "a head size is not a multiple of 16";
  else if (!((float)a.scale >= 1e-30f && (float)a.scale <= 1e30f)) why = "the scale is not positive, or out of range";
  else if (variant == WGMMA && d->sm != 90) why = "products of warpgroups need compute capability 9.0";
  else if (variant == WGMMA && scored(a)) why = "wgmma has no soft caps, slopes, block masks and dropout";
  else if (variant == WGMMA && a.backward && most(dim, dv) > 128)
    why = "the backward pass of wgmma supports heads of up to 128";
  if (!why) return fits_shared(d, a, variant, a.backward);
  fail(d, ULY_UNSUPPORTED, "kernels on tensor cores: %s", why);
  return false;
}
static bool mma_fits(uly_device *d, const AttentionArgs &a) { return cores_fit(d, a, MMA); }
static bool mma_fits_forward(uly_device *d, const void *a) { return mma_fits(d, attention_args(a, false)); }
static bool mma_fits_backward(uly_device *d, const void *a) { return mma_fits(d, attention_args(a, true)); }
static bool wgmma_fits_forward(uly_device *d, const void *a) { return cores_fit(d, attention_args(a, false), WGMMA); }
static bool wgmma_fits_backward(uly_device *d, const void *a) { return cores_fit(d, attention_args(a, true), WGMMA); }

// mma: BF16 on tensor cores. own: F32 and BF16 in F32 arithmetic. small: the same, for GPUs with
// less shared memory. wgmma: BF16 with Hopper's own products; on such a GPU `own` supports all that
// they do, so they only run if they are selected by name, until they have passed the checks on a
// GPU.
static const RegisterKernels registered({
    {ULY_OP_ATTENTION_FORWARD, "mma", mma_forward, mma_fits_forward},
    {ULY_OP_ATTENTION_BACKWARD, "mma", mma_backward, mma_fits_backward},
    {ULY_OP_ATTENTION_FORWARD, "own", own_forward, own_fits_forward},
    {ULY_OP_ATTENTION_BACKWARD, "own", own_backward, own_fits_backward},
    {ULY_OP_ATTENTION_FORWARD, "wgmma", wgmma_forward, wgmma_fits_forward},
    {ULY_OP_ATTENTION_BACKWARD, "wgmma", wgmma_backward, wgmma_fits_backward},
    {ULY_OP_ATTENTION_FORWARD, "small", small_forward, small_fits_forward},
    {ULY_OP_ATTENTION_BACKWARD, "small", small_backward, small_fits_backward},
});
