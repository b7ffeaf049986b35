// The gated delta rule: argument checks, sizes of workspaces, and launches. The kernels are in
// delta_forward.cu and delta_backward.cu; delta.h has the formulas.
#include "delta.h"

#include "check.h"
#include "tables.h"

namespace {

// Operands has the operands of all four operations. Operands that an operation does not have are
// nil.
struct Operands {
  const char *op;
  DeltaPass pass;
  uly_tensor q = {}, k = {}, v = {}, out = {}, g = {}, beta = {}, dout = {}, dq = {}, dk = {}, dv = {}, dg = {},
             dbeta = {};
  uly_tensor state_in = {}, state_out = {}, dstate_out = {}, dstate_in = {}, transition = {}, saved = {},
             workspace = {};
  uly_list cu = {};
  const int64_t *key_head = nullptr;
  int64_t chunk = 0, panel = 0;
  double scale = 0;
  bool l2norm = false, per_head = false, deterministic = false;
  Operands(const char *op, DeltaPass pass) : op(op), pass(pass) {}
};

bool given(const uly_tensor &t) { return t.dtype != 0; }

// check_heads checks the heads of k and of the values: v, or dout if there is no v.
void check_heads(Check &c, const uly_tensor &k, const uly_tensor &values, const int64_t *key_head) {
  if (k.ndim != 3 || values.ndim != 3)
    return c.refuse("k is %s, values are %s: want [tokens, heads, features]", text_of(k).c_str(),
                    text_of(values).c_str());
  const int64_t hk = k.shape[1], hv = values.shape[1], dk = k.shape[2], dv = values.shape[2];
  if (dk < 1 || dv < 1)
    return c.refuse("head sizes %lld and %lld: they must be at least 1", (long long)dk, (long long)dv);
  if (!key_head && hv > 0 && (hk == 0 || hv % hk != 0))
    return c.refuse("%lld value heads for %lld key heads: KeyHead is required, because the number does not divide",
                    (long long)hv, (long long)hk);
  for (int64_t h = 0; key_head && h < hv; h++)
    if (key_head[h] < (h ? key_head[h - 1] : 0) || key_head[h] >= hk)
      return c.refuse("KeyHead[%lld] = %lld: KeyHead must not decrease and must be below %lld", (long long)h,
                      (long long)key_head[h], (long long)hk);
}

void check_chunk(Check &c, int64_t chunk) {
  if (chunk != 0 && chunk < 16) c.refuse("Chunk is %lld: want 16 or more, or 0", (long long)chunk);
}

// check_states requires [n, Hv, Dk, Dv] with n at most the number of documents, and returns n.
int64_t check_states(Check &c, const char *name, const uly_tensor &t, const DeltaShape &s, int64_t documents) {
  if (!given(t)) return 0;
  c.dense(name, t, ULY_F32, {-1, s.value_heads, s.dk, s.dv});
  if (c.failed()) return 0;
  if (t.shape[0] > documents)
    c.refuse("%s is %s: there are %lld documents", name, text_of(t).c_str(), (long long)documents);
  return t.shape[0];
}

// check_room requires memory of at least so many bytes.
void check_room(Check &c, const char *name, const uly_tensor &t, int64_t bytes) {
  c.dense(name, t, ULY_U8, {-1});
  if (!c.failed() && t.shape[0] < bytes)
    c.refuse("%s %s: GatedDeltaSizes requires %lld bytes", name, text_of(t).c_str(), (long long)bytes);
  if (!c.failed() && (uintptr_t)t.data % 256 != 0) c.refuse("%s at %p: it must be aligned to 256 bytes", name, t.data);
}

DeltaView view(const uly_tensor &t) {
  if (!given(t)) return {};
  const bool wide =
      t.stride[0] % 4 == 0 && t.stride[1] % 4 == 0 && (uintptr_t)t.data % (t.dtype == ULY_BF16 ? 8 : 16) == 0;
  const int64_t size = t.dtype == ULY_BF16 ? 2 : 4;
  const bool vectors = t.shape[2] % 2 == 0 && aligned16(t.data, size, t.stride[0], t.stride[1]);
  return {t.data, t.stride[0], t.stride[1], (int)t.shape[2], wide, vectors};
}
DeltaGate gate(const uly_tensor &t) {
  return given(t) ? DeltaGate{(float *)t.data, t.stride[0], t.stride[1]} : DeltaGate{};
}

// start launches kernel `which` of a table for `work` items. `configured` is for allow_shared.
struct Kernel {
  const DeltaKernel *of;
  std::atomic<uint64_t> configured[7];
};
Kernel norms = {delta_norms, {}}, prepare = {delta_prepare, {}}, scan = {delta_scan, {}}, out = {delta_out, {}},
       scan_back = {delta_scan_back, {}}, gradients = {delta_gradients, {}}, finish = {delta_finish, {}},
       join = {delta_join, {}}, join_back = {delta_join_back, {}};

int32_t start(uly_device *d, uly_stream *s, const char *what, Kernel &kernel, int which, int64_t shared, int64_t work,
              const DeltaCall &call, int threads = DELTA_THREADS) {
  if (work == 0) return ULY_OK;
  if (shared > 0) TRY(allow_shared(d, (const void *)kernel.of[which], d->shared_limit, kernel.configured[which], what));
  LAUNCH(kernel.of[which], (unsigned)least(work, GRID_LIMIT), (unsigned)threads, (size_t)shared, s, call);
  return check_launch(d, what);
}

// by_keys returns the number of a kernel for the type and the features of keys.
int by_keys(bool bf16, const DeltaCall &call) { return !bf16 ? 0 : call.dim_k <= 128 ? 1 : 2; }

// copy_through copies states through documents without tokens, which the kernels do not process:
// such a document's final state is its initial state, or zero. In the backward pass, it copies the
// gradients of the final states to the gradients of the initial states.
int32_t copy_through(uly_device *d, uly_stream *s, const Operands &a, const DeltaShape &shape, bool forward, int64_t in,
                     int64_t out) {
  const uly_tensor &from = forward ? a.state_in : a.dstate_out, &to = forward ? a.state_out : a.dstate_in;
  if (!given(to)) return ULY_OK;
  const int64_t bytes = shape.value_heads * shape.dk * shape.dv * 4;
  for (int64_t i = 0; i < a.cu.documents() && bytes > 0; i++) {
    if (a.cu[i + 1] > a.cu[i]) continue;
    const int64_t behind = i - (a.cu.documents() - out), at = forward ? behind : i, of = forward ? i : behind;
    const bool has_to = forward ? behind >= 0 : i < in, has_from = given(from) && (forward ? i < in : behind >= 0);
    if (!has_to) continue;
    char *p = (char *)to.data + at * bytes;
    const cudaError_t e = has_from ? cudaMemcpyAsync(p, (const char *)from.data + of * bytes, (size_t)bytes,
                                                     cudaMemcpyDeviceToDevice, s->s)
                                   : cudaMemsetAsync(p, 0, (size_t)bytes, s->s);
    TRY(check(d, e, a.op));
  }
  return ULY_OK;
}

// set_panel sets the extents of a panel between two borders, and the memory that depends on it. The
// carried states and what is at joints are saved if a backward pass follows. The results of
// DeltaState and DeltaStateGrad serve as their carried states, because these operations have one
// document.
void set_panel(DeltaCall &call, const Operands &a, const DeltaShape &shape, const DeltaLayout &l,
               const DeltaSaved &of_saved, int64_t panel, const DeltaBorder &lo, const DeltaBorder &hi) {
  char *const w = (char *)a.workspace.data, *const kept = (char *)a.saved.data;
  call.chunk0 = lo.chunk, call.chunks = hi.chunk - lo.chunk, call.token0 = lo.token, call.tokens = hi.token - lo.token;
  call.document0 = lo.document, call.panel_documents = hi.document + hi.crossed - lo.document, call.seam0 = lo.seam;
  call.segment0 = lo.segment, call.segments = hi.segments_end - lo.segment, call.joint0 = lo.segment - lo.document;
  const bool saved = given(a.saved);
  call.solve = saved ? kept : w + l.solve;
  call.solve_token = saved ? 0 : lo.token, call.solve_rows = saved ? shape.tokens : l.rows;
  if (a.pass == DELTA_STATE) {
    call.carried_in = call.carried_out = call.state_out;
    call.dcarried_in = call.dcarried_out = call.dstate_in;
    return;
  }
  // border n is the one before panel n
  auto carried = [&](int64_t border) {
    return (float *)(saved ? kept + of_saved.carried + (border - 1) * delta_state(shape) : w + l.carried[border % 2]);
  };
  call.ends = (float *)(saved ? kept + of_saved.ends + panel * of_saved.panel_ends : w + l.ends);
  call.transitions =
      (float *)(saved ? kept + of_saved.transitions + panel * of_saved.panel_transitions : w + l.transitions);
  call.carried_in = lo.crossed ? carried(panel) : nullptr;
  call.carried_out = hi.crossed && a.pass == DELTA_FORWARD ? carried(panel + 1) : nullptr;
  call.dcarried_in = (const float *)(w + l.carried[(panel + 1) % 2]);
  call.dcarried_out = (float *)(w + l.carried[panel % 2]);
}

// TileBytes has the bytes of shared memory of the kernels that process chunks in parallel.
struct TileBytes {
  int64_t prepare, out, gradients;
};
template <int SIZE>
constexpr TileBytes tile_bytes = {DeltaTiles<SIZE>::PREPARE, DeltaTiles<SIZE>::OUT, DeltaTiles<SIZE>::GRADIENTS};

// run_scan launches a scan. If documents of the panel are divided into segments, it first computes
// the states at the joints between them.
int32_t run_scan(uly_device *d, uly_stream *s, const Operands &a, bool bf16, DeltaCall call, Kernel &kernel,
                 Kernel &joins, int64_t transition_slices) {
  const bool back = &kernel == &scan_back;
  const int half = delta_scan_half(call.dim_k),
            which = !bf16        ? 0
                    : half == 32 ? 1
                    : half == 64 ? 2
                                 : 3,
            threads = bf16 ? (int)DELTA_SCAN_THREADS : (int)DELTA_THREADS;
  const int64_t blocks = call.segments * call.value_heads, value_slices = ceil_div(call.dim_v, DELTA_SLICE);
  // launch launches the scan, or one that computes out.
  auto launch = [&](DeltaCall c, int64_t slices, bool with_out) -> int32_t {
    const bool queries = back || with_out;
    c.stages = delta_scan_stages(c.dim_k, queries, d->shared_limit);
    const int64_t bytes = bf16 ? delta_scan_tile_bytes(c.dim_k, queries, c.stages) : delta_scan_bytes(c.dim_k, c.chunk);
    // A block's registers are for one slice. So it has no loop over slices, and what does not fit
    // into a grid is launched after it.
    const int64_t all = blocks * slices;
    for (c.first_block = 0; c.first_block < all; c.first_block += GRID_LIMIT)
      TRY(start(d, s, a.op, kernel, which + (with_out ? 3 : 0), bytes, least(all - c.first_block, GRID_LIMIT), c,
                threads));
    return ULY_OK;
  };
  const bool joined = call.solved && !back; // the forward pass has saved the states at joints
  if (call.segments > call.panel_documents && !joined) {
    DeltaCall partial = call;
    partial.partial = true, partial.x = partial.y = partial.states = partial.dstates = nullptr;
    const int64_t moves = back ? 0 : ceil_div(call.dim_k, DELTA_SLICE);
    TRY(launch(partial, value_slices + moves, false));
    const bool large = call.dim_k > 128;
    TRY(start(d, s, a.op, joins, large, delta_join_bytes(large ? DELTA_HEAD : 128),
              call.panel_documents * call.value_heads * ceil_div(call.dim_v, DELTA_JOIN_COLUMNS), call));
  }
  return launch(call, value_slices + transition_slices, bf16 && a.pass == DELTA_FORWARD);
}

// run_panel launches the kernels for a panel.
int32_t run_panel(uly_device *d, uly_stream *s, const Operands &a, bool bf16, const DeltaCall &call) {
  const bool backward = a.pass == DELTA_BACKWARD, has_v = given(a.v);
  const TileBytes tiles = bf16 ? tile_bytes<2> : tile_bytes<4>;
  const int64_t halves = DELTA_THREADS / 16, chunks = call.chunks * call.value_heads; // rows of a block
  if (a.l2norm) TRY(start(d, s, a.op, norms, bf16, 0, ceil_div(call.key_heads * call.tokens, halves), call));
  TRY(start(d, s, a.op, prepare, bf16, tiles.prepare, chunks, call));
  // DeltaStateGrad has no values and needs only the backward scan.
  if (has_v) {
    DeltaCall forward = call;
    if (backward) forward.state_out = nullptr, forward.states_out = 0;
    TRY(run_scan(d, s, a, bf16, forward, scan, join, given(a.transition) ? ceil_div(call.dim_k, DELTA_SLICE) : 0));
  }
  if (a.pass == DELTA_FORWARD && !bf16) // the scan in BF16 has computed out
    TRY(start(d, s, a.op, out, 0, tiles.out, chunks * ceil_div(call.dim_v, 64), call));
  if (backward || !has_v) TRY(run_scan(d, s, a, bf16, call, scan_back, join_back, 0));
  if (!backward) return ULY_OK;
  TRY(start(d, s, a.op, gradients, bf16, tiles.gradients, chunks, call));
  const int64_t heads = a.per_head ? call.value_heads : call.key_heads;
  return start(d, s, a.op, finish, by_keys(bf16, call), 0, ceil_div(2 * call.tokens * heads, halves), call);
}

int32_t run(uly_device *d, uly_stream *s, const Operands &a) {
  const bool backward = a.pass == DELTA_BACKWARD, state = a.pass == DELTA_STATE, has_q = given(a.q), has_v = given(a.v);
  const uly_tensor &values = has_v ? a.v : a.dout;
  Check c(d, a.op);
  check_heads(c, a.k, values, a.key_head);
  if (c.failed()) return c.code;
  const int type = c.compute("k", a.k);
  const int64_t tokens = a.k.shape[0];
  const DeltaShape shape = delta_shape(type == ULY_BF16 ? 2 : 4, tokens, a.k.shape[1], values.shape[1], a.k.shape[2],
                                       values.shape[2], a.chunk, a.key_head, a.panel);
  const int64_t hk = shape.key_heads, hv = shape.value_heads, dk = shape.dk, dv = shape.dv,
                gradient_heads = a.per_head ? hv : hk;
  c.rows("k", a.k, type, {tokens, hk, dk});
  if (has_q || !state) c.rows("q", a.q, type, {tokens, hk, dk});
  if (has_v || !state) c.rows("v", a.v, type, {tokens, hv, dv});
  c.shape("g", a.g, ULY_F32, {tokens, hv});
  c.shape("beta", a.beta, ULY_F32, {tokens, hv});
  if (a.pass == DELTA_FORWARD) c.rows("out", a.out, type, {tokens, hv, dv});
  if (backward || !has_v) c.rows("dout", a.dout, type, {tokens, hv, dv});
  if (backward) {
    c.rows("dq", a.dq, type, {tokens, gradient_heads, dk});
    c.rows("dk", a.dk, type, {tokens, gradient_heads, dk});
    c.rows("dv", a.dv, type, {tokens, hv, dv});
    c.shape("dg", a.dg, ULY_F32, {tokens, hv});
    c.shape("dbeta", a.dbeta, ULY_F32, {tokens, hv});
  }
  c.documents("Cu", a.cu, tokens);
  check_chunk(c, a.chunk);
  if (a.panel < 0) c.refuse("Panel is %lld: want 0 or more", (long long)a.panel);
  if (c.failed()) return c.code;
  const int64_t in =
      check_states(c, state ? "DState" : "StateIn", given(a.state_in) || !given(a.dstate_in) ? a.state_in : a.dstate_in,
                   shape, a.cu.documents());
  const int64_t out_states =
      check_states(c, state ? "State" : "StateOut",
                   given(a.state_out) || !given(a.dstate_out) ? a.state_out : a.dstate_out, shape, a.cu.documents());
  if (given(a.dstate_in)) c.dense("DStateIn", a.dstate_in, ULY_F32, {in, hv, dk, dv});
  if (given(a.dstate_out)) c.dense("DStateOut", a.dstate_out, ULY_F32, {out_states, hv, dk, dv});
  if (given(a.transition)) c.dense("Transition", a.transition, ULY_F32, {hv, dk, dk});
  const int64_t documents = state ? 1 : delta_documents(a.cu, a.cu.documents(), tokens);
  const bool divided = !state && !a.deterministic && !d->deterministic;
  const DeltaLayout l = delta_layout(shape, documents, a.pass, divided);
  const DeltaSaved saved(shape, divided);
  if (given(a.saved) || (backward && saved.bytes > 0)) check_room(c, "saved", a.saved, saved.bytes);
  check_room(c, "workspace", a.workspace, l.bytes);
  if (c.failed()) return c.code;
  if (most(dk, dv) > DELTA_HEAD)
    return fail(d, ULY_UNSUPPORTED, "cuda.%s: head sizes %lld and %lld: the kernels support at most %d", a.op,
                (long long)dk, (long long)dv, (int)DELTA_HEAD);

  if (!state) TRY(copy_through(d, s, a, shape, !backward, in, out_states));
  if (hv == 0 && !backward) return ULY_OK;
  if (tokens == 0 && !state) return ULY_OK;
  DeltaCall call = {};
  char *w = (char *)a.workspace.data;
  Tables tables(d, s, a.op, w);
  const int64_t segment = divided ? delta_segment(shape, a.cu.data, a.cu.documents()) : DELTA_UNDIVIDED;
  delta_tables(shape, l, a.cu, a.cu.documents(), state, segment, [&](int64_t at, int64_t value) { tables(at, value); });
  TRY(tables.end());
  auto table = [&](int64_t at) { return (const int64_t *)(w + at); };
  auto floats = [&](int64_t at) { return (float *)(w + at); };
  call.q = view(a.q), call.k = view(a.k), call.v = view(a.v), call.out = view(a.out), call.dout = view(a.dout);
  call.dq = view(a.dq), call.dk = view(a.dk), call.dv = view(a.dv);
  call.g = gate(a.g), call.beta = gate(a.beta), call.dg = gate(a.dg), call.dbeta = gate(a.dbeta);
  call.value_heads = hv, call.key_heads = hk, call.documents = documents;
  call.dim_k = (int)dk, call.dim_v = (int)dv, call.chunk = (int)shape.chunk;
  call.start = table(l.start), call.chunks_before = table(l.chunks), call.document = table(l.document);
  call.segments_before = table(l.segments), call.segment = segment, call.joints = l.joints;
  call.dends = floats(l.ends);
  call.key_head = table(l.key_head), call.value_first = table(l.first);
  call.states_in = in, call.states_out = out_states, call.all_documents = a.cu.documents();
  call.state_in = (const float *)a.state_in.data, call.state_out = (float *)a.state_out.data;
  call.dstate_in = (float *)a.dstate_in.data, call.dstate_out = (const float *)a.dstate_out.data,
  call.transition = (float *)a.transition.data;
  call.scale = (float)a.scale, call.normed = a.l2norm, call.per_head = a.per_head;
  call.rows = l.rows, call.slots = l.slots;
  if (a.l2norm) call.unit_q = floats(l.unit_q), call.unit_k = floats(l.unit_k);
  call.decay = (float4 *)(w + l.decay);
  call.scores = has_q ? w + l.scores : nullptr;
  if (l.states > 0) call.x = w + l.x, call.states = w + l.states;
  if (backward) call.y = w + l.y, call.grad_q = w + l.dq, call.grad_k = w + l.dk, call.dstates = w + l.dstates;
  call.solved = backward;

  const bool descends = backward || (state && !has_v); // from the last panel to the first
  const int64_t stride = delta_stride(shape), panels = delta_panels(shape);
  DeltaBorders border = {a.cu.data, tokens, shape.chunk, segment};
  const DeltaBorder none = {}, end = {0, tokens, documents, 0, documents, documents, false};
  for (int64_t n = 0; n < panels; n++) {
    const int64_t panel = descends ? panels - 1 - n : n;
    const DeltaBorder lo = tokens > 0 ? border(panel * stride) : none,
                      hi = tokens > 0 ? border((panel + 1) * stride) : end;
    set_panel(call, a, shape, l, saved, panel, lo, hi);
    TRY(run_panel(d, s, a, type == ULY_BF16, call));
  }
  return ULY_OK;
}

void set_operands(Operands &x, const uly_gated_delta &a) {
  x.q = a.q, x.k = a.k, x.v = a.v, x.out = a.out, x.g = a.g, x.beta = a.beta;
  x.state_in = a.state_in, x.state_out = a.state_out, x.saved = a.saved, x.workspace = a.workspace;
  x.cu = a.cu, x.key_head = a.key_head, x.chunk = a.chunk, x.panel = a.panel, x.scale = a.scale, x.l2norm = a.l2norm;
  x.deterministic = a.deterministic;
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  Operands x("GatedDeltaForward", DELTA_FORWARD);
  set_operands(x, *(const uly_gated_delta *)args);
  return run(d, s, x);
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_gated_delta_grad &a = *(const uly_gated_delta_grad *)args;
  Operands x("GatedDeltaBackward", DELTA_BACKWARD);
  set_operands(x, a.gated_delta);
  x.per_head = a.per_head;
  x.dout = a.dout, x.dq = a.dq, x.dk = a.dk, x.dv = a.dv, x.dg = a.dg, x.dbeta = a.dbeta;
  x.dstate_out = a.dstate_out, x.dstate_in = a.dstate_in;
  return run(d, s, x);
}

// one returns [Hv, Dk, Dv] as [1, Hv, Dk, Dv]. DeltaState and DeltaStateGrad treat all tokens as
// one document with one state.
uly_tensor one(uly_tensor t) {
  if (t.ndim < 0 || t.ndim > 7) return t;
  for (int i = t.ndim; i > 0; i--) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
  t.shape[0] = 1, t.ndim++;
  return t;
}

int32_t state(uly_device *d, uly_stream *s, const void *args) {
  const uly_delta_state &a = *(const uly_delta_state *)args;
  const int64_t cu[2] = {0, a.k.shape[0]};
  Operands x("DeltaState", DELTA_STATE);
  x.k = a.k, x.v = a.v, x.g = a.g, x.beta = a.beta, x.state_out = one(a.state), x.transition = a.transition,
  x.workspace = a.workspace;
  x.cu = {cu, 2, 2}, x.key_head = a.key_head, x.chunk = a.chunk, x.panel = a.panel, x.l2norm = a.l2norm;
  return run(d, s, x);
}

int32_t state_grad(uly_device *d, uly_stream *s, const void *args) {
  const uly_delta_state_grad &a = *(const uly_delta_state_grad *)args;
  const int64_t cu[2] = {0, a.k.shape[0]};
  Operands x("DeltaStateGrad", DELTA_STATE);
  x.q = a.q, x.k = a.k, x.g = a.g, x.beta = a.beta, x.dout = a.dout, x.dstate_in = one(a.dstate),
  x.workspace = a.workspace;
  x.cu = {cu, 2, 2}, x.key_head = a.key_head, x.chunk = a.chunk, x.panel = a.panel, x.l2norm = a.l2norm,
  x.scale = a.scale;
  return run(d, s, x);
}

} // namespace

int32_t delta_sizes(uly_device *d, const uly_gated_delta *a, uly_delta_sizes *to) {
  Check c(d, "GatedDeltaSizes");
  check_heads(c, a->k, a->v, a->key_head);
  check_chunk(c, a->chunk);
  if (c.failed()) return c.code;
  const DeltaShape s = delta_shape(a->k.dtype == ULY_BF16 ? 2 : 4, a->k.shape[0], a->k.shape[1], a->v.shape[1],
                                   a->k.shape[2], a->v.shape[2], a->chunk, a->key_head, a->panel);
  const int64_t documents = delta_documents(a->cu, a->cu.documents(), s.tokens);
  const bool divided = !a->deterministic && !d->deterministic;
  *to = {DeltaSaved(s, divided).bytes, delta_layout(s, documents, DELTA_FORWARD, divided).bytes,
         delta_layout(s, documents, DELTA_BACKWARD, divided).bytes, delta_layout(s, 1, DELTA_STATE, false).bytes};
  return ULY_OK;
}

static const RegisterKernels registered({
    {ULY_OP_GATED_DELTA_FORWARD, "own", forward},
    {ULY_OP_GATED_DELTA_BACKWARD, "own", backward},
    {ULY_OP_DELTA_STATE, "own", state},
    {ULY_OP_DELTA_STATE_GRAD, "own", state_grad},
});
