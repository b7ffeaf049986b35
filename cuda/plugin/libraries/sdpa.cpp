// Attention by cuDNN's graphs (cudnn-frontend, version 1), in BF16, forward and backward.
// sdpa_shape.h decides which calls cuDNN gets. The plan of a shape is built when the shape is first
// used, and kept.
#include "sdpa.h"

#include "bytes_key.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <cudnn_frontend.h>
#pragma GCC diagnostic pop

#include <unordered_map>
#include <vector>

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

namespace {

// Ids of tensors in graphs. The arrays of offsets have the ids from OFFSETS on, in the order of
// sdpa_shape.h.
enum uid : int64_t { Q = 1, K, V, OUT, STATS, DOUT, DQ, DK, DV, LENGTHS_Q, LENGTHS_K, OFFSETS };

// graph_builder makes the graph of a shape.
class graph_builder {
 public:
  graph_builder(const sdpa_shape &shape, Graph &graph) : s(shape), g(graph) {
    g.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (s.packed) {
      lengths_q = array("lengths_q", LENGTHS_Q, s.b, fe::DataType_t::INT32);
      lengths_k = array("lengths_k", LENGTHS_K, s.b, fe::DataType_t::INT32);
      for (int i = 0; i < (s.backward ? SDPA_OFFSETS : SDPA_DOUT); i++)
        offsets[i] = array("offsets", OFFSETS + i, s.b + 1, fe::DataType_t::INT64);
    }
    if (s.backward) backward();
    else forward();
  }

 private:
  const sdpa_shape &s;
  Graph &g;
  Tensor lengths_q, lengths_k, offsets[SDPA_OFFSETS];

  Tensor array(const char *name, int64_t uid, int64_t n, fe::DataType_t type) {
    return g.tensor(fe::graph::Tensor_attributes()
                        .set_name(name)
                        .set_uid(uid)
                        .set_dim({n, 1, 1, 1})
                        .set_stride({1, 1, 1, 1})
                        .set_data_type(type));
  }

  // set_layout sets the shape [documents, heads, tokens, width] and the strides of a tensor.
  void set_layout(Tensor t, int64_t uid, int which, int64_t heads, int64_t rows, int64_t width, const sdpa_strides &x) {
    t->set_uid(uid).set_dim({s.b, heads, rows, width}).set_stride({rows * x.token, x.head, x.token, 1});
    if (s.packed) t->set_ragged_offset(offsets[which]);
  }
  Tensor input(const char *name, int64_t uid, int which, int64_t heads, int64_t rows, int64_t width,
               const sdpa_strides &x) {
    Tensor t = g.tensor(fe::graph::Tensor_attributes().set_name(name));
    set_layout(t, uid, which, heads, rows, width, x);
    return t;
  }
  void output(Tensor t, int64_t uid, int which, int64_t heads, int64_t rows, int64_t width, const sdpa_strides &x) {
    t->set_output(true);
    set_layout(t, uid, which, heads, rows, width, x);
  }
  void set_stats_layout(Tensor t) {
    t->set_uid(STATS).set_data_type(fe::DataType_t::FLOAT).set_dim({s.b, s.hq, s.sq, 1});
    if (s.packed) t->set_stride({s.hq * s.sq, 1, s.hq, 1}).set_ragged_offset(offsets[SDPA_STATS]);
    else t->set_stride({s.hq * s.sq, s.sq, 1, 1});
  }

  template <class Options> void mask(Options &o) {
    o.set_attn_scale(s.scale);
    if (s.packed) o.set_padding_mask(true).set_seq_len_q(lengths_q).set_seq_len_kv(lengths_k);
    o.set_diagonal_alignment(s.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                            : fe::DiagonalAlignment_t::TOP_LEFT);
    if (s.causal) o.set_diagonal_band_right_bound(0);
    if (s.left) o.set_diagonal_band_left_bound(static_cast<int>(s.left));
  }

  void forward() {
    Tensor q = input("q", Q, SDPA_Q, s.hq, s.sq, s.d, s.q), k = input("k", K, SDPA_K, s.hkv, s.sk, s.d, s.k),
           v = input("v", V, SDPA_V, s.hkv, s.sk, s.dv, s.v);
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
    mask(options);
    auto results = g.sdpa(q, k, v, options);
    output(results[0], OUT, SDPA_OUT, s.hq, s.sq, s.dv, s.out);
    results[1]->set_output(true);
    set_stats_layout(results[1]);
  }

  void backward() {
    Tensor q = input("q", Q, SDPA_Q, s.hq, s.sq, s.d, s.q), k = input("k", K, SDPA_K, s.hkv, s.sk, s.d, s.k),
           v = input("v", V, SDPA_V, s.hkv, s.sk, s.dv, s.v);
    Tensor out = input("out", OUT, SDPA_OUT, s.hq, s.sq, s.dv, s.out),
           dout = input("dout", DOUT, SDPA_DOUT, s.hq, s.sq, s.dv, s.dout);
    Tensor stats = g.tensor(fe::graph::Tensor_attributes().set_name("stats"));
    set_stats_layout(stats);
    auto options = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    mask(options);
    if (s.packed) options.set_max_total_seq_len_q(s.tokens_q).set_max_total_seq_len_kv(s.tokens_k);
    auto results = g.sdpa_backward(q, k, v, out, dout, stats, options);
    output(results[0], DQ, SDPA_DQ, s.hq, s.sq, s.d, s.dq);
    output(results[1], DK, SDPA_DK, s.hkv, s.sk, s.d, s.dk);
    output(results[2], DV, SDPA_DV, s.hkv, s.sk, s.dv, s.dgv);
  }
};

struct plan {
  std::shared_ptr<Graph> graph;
  int64_t workspace = 0;
  // why cuDNN does not support the shape; graph is then NULL
  std::string why;
  std::unordered_map<int64_t, void *> pack; // the tensors of a call by id
};

struct plans : library_state {
  cudnnHandle_t handle = nullptr;
  std::string broken; // why cuDNN cannot be used on this GPU
  BytesMap<sdpa_shape, plan> known;
  ~plans() override {
    known.clear();
    if (handle) cudnnDestroy(handle);
  }
};

// build builds a plan, for the GPU of a handle or for the GPU that `properties` describes.
fe::error_t build(plan &p, const sdpa_shape &s, cudnnHandle_t handle, std::shared_ptr<fe::DeviceProperties> properties,
                  int sm) {
  p.graph = std::make_shared<Graph>();
  Graph &g = *p.graph;
  if (properties) g.set_sm_version(sm).set_device_properties(properties);
  graph_builder(s, g);
  fe::error_t e = g.validate();
  if (e.is_good()) e = properties ? g.build_operation_graph() : g.build_operation_graph(handle);
  if (e.is_good()) e = g.create_execution_plans({fe::HeurMode_t::A});
  if (e.is_good()) e = properties ? g.check_support() : g.check_support(handle);
  if (e.is_good()) e = properties ? g.build_plans() : g.build_plans(handle);
  if (e.is_good()) e = g.get_workspace_size(p.workspace);
  return e;
}

// unsupported records why cuDNN does not support a call. The message appears if ULYSSES_KERNEL
// selects cuDNN.
std::nullptr_t unsupported(uly_device *d, const std::string &why) {
  fail(d, ULY_UNSUPPORTED, "cuDNN: %s", why.c_str());
  return nullptr;
}

// find returns NULL if cuDNN cannot be used or does not support the shape.
plan *find(uly_device *d, const sdpa_shape &s) {
  library_state *&slot = libraries_of(d).sdpa;
  if (!slot) slot = new plans;
  plans &all = *static_cast<plans *>(slot);
  if (!all.handle && all.broken.empty()) {
    const cudnnStatus_t status = cudnnCreate(&all.handle);
    if (status != CUDNN_STATUS_SUCCESS) {
      all.handle = nullptr;
      all.broken = std::string("cudnnCreate: ") + cudnnGetErrorString(status);
    }
  }
  if (!all.handle) return unsupported(d, all.broken);
  auto at = all.known.find(s);
  if (at == all.known.end()) {
    plan p;
    try {
      fe::error_t e = build(p, s, all.handle, nullptr, 0);
      if (e.is_bad()) p.why = "no plan: " + e.get_message();
    } catch (const std::exception &e) { // some checks of the frontend throw
      p.why = std::string("no plan: ") + e.what();
    }
    if (!p.why.empty()) p.graph = nullptr;
    at = all.known.emplace(s, p).first;
  }
  return at->second.graph ? &at->second : unsupported(d, at->second.why);
}

bool available(uly_device *d, const AttentionArgs &a) {
  if (!d->absent && !library_open(LIB_CUDNN)) unsupported(d, library_reason(LIB_CUDNN));
  // In the backward pass, cuDNN adds to dq in the order in which blocks finish.
  else if ((d->deterministic || a.deterministic) && a.backward)
    unsupported(d, "its backward pass is not bitwise reproducible");
  else return true; // cuDNN supports every GPU that the plug-in opens
  return false;
}

int64_t bytes_of(const sdpa_shape &s, const plan &p) { return sdpa_layout_of(s).plan + p.workspace; }

// subcall is one of the calls into which attention is split (sdpa_split.h), with its plan.
struct subcall {
  AttentionArgs call;
  sdpa_shape shape;
  plan *p;
};

// subcalls_of returns the calls for cuDNN. It returns none, and records the reason, if cuDNN does
// not support one of them.
std::vector<subcall> subcalls_of(uly_device *d, const AttentionArgs &a) {
  if (!available(d, a)) return {};
  std::vector<subcall> calls;
  sdpa_subcalls cut;
  const char *why = sdpa_split(a, &cut);
  for (int64_t i = 0; !why && i < cut.n; i++) {
    calls.push_back({sdpa_subcall_of(a, cut.call[i]), {}, nullptr});
    why = sdpa_describe(calls.back().call, &calls.back().shape);
  }
  if (!why) return calls;
  unsupported(d, why);
  return {};
}

// planned_subcalls returns the calls with their plans, for known documents. It returns none if one
// of them has no plan.
std::vector<subcall> planned_subcalls(uly_device *d, const AttentionArgs &a) {
  std::vector<subcall> calls = subcalls_of(d, a);
  for (subcall &x : calls) {
    x.p = find(d, x.shape);
    // The caller allocated the workspace before the documents were known, with the size sdpa_bound.
    if (x.p && (x.shape.packed || x.shape.b > 1) && bytes_of(x.shape, *x.p) > sdpa_bound(x.shape))
      x.p = unsupported(d, "the plan needs more workspace than the bound for unknown documents");
    if (!x.p) return {};
  }
  return calls;
}

// execute enqueues one call. `at` is the workspace after the tables of documents; all calls of an
// attention use the same memory, one after another.
int32_t execute(uly_device *d, uly_stream *stream, const subcall &x, const AttentionLayout &tables, char *at,
                const char *op) {
  const AttentionArgs &a = x.call;
  const sdpa_shape &s = x.shape;
  plan *p = x.p;
  const sdpa_layout mine = sdpa_layout_of(s);
  if (s.packed) {
    TRY(sdpa_tables(d, stream, a, tables, s, at));
    p->pack[LENGTHS_Q] = at + mine.lengths_q;
    p->pack[LENGTHS_K] = at + mine.lengths_k;
    for (int i = 0; i < (s.backward ? SDPA_OFFSETS : SDPA_DOUT); i++)
      p->pack[OFFSETS + i] = at + mine.offsets + 8 * i * (s.b + 1);
  }
  float *stats = reinterpret_cast<float *>(at + mine.stats);
  if (s.backward) TRY(sdpa_stats(d, stream, a, s, stats, true));
  p->pack[Q] = a.q.data, p->pack[K] = a.k.data, p->pack[V] = a.v.data, p->pack[OUT] = a.out.data,
  p->pack[STATS] = stats;
  if (s.backward)
    p->pack[DOUT] = a.dout.data, p->pack[DQ] = a.dq.data, p->pack[DK] = a.dk.data, p->pack[DV] = a.dv.data;
  fe::error_t e = p->graph->execute(static_cast<plans *>(libraries_of(d).sdpa)->handle, p->pack, at + mine.plan);
  if (e.is_bad()) return fail(d, ULY_DEVICE, "cuda.%s: cuDNN: %s", op, e.get_message().c_str());
  return s.backward ? ULY_OK : sdpa_stats(d, stream, a, s, stats, false);
}

} // namespace

static int32_t sdpa_run(uly_device *d, uly_stream *stream, const AttentionArgs &a) {
  const char *op = a.backward ? "AttentionBackward" : "AttentionForward";
  const std::vector<subcall> calls = planned_subcalls(d, a);
  if (calls.empty()) return ULY_UNSUPPORTED; // the reason is recorded
  int64_t bytes = 0;
  bool packed = false;
  for (const subcall &x : calls) bytes = most(bytes, bytes_of(x.shape, *x.p)), packed = packed || x.shape.packed;
  const AttentionLayout tables = attention_layout(a, a.backward, false);
  if (a.workspace.shape[0] < tables.tables + bytes)
    return fail(d, ULY_INVALID_ARGUMENT, "cuda.%s: workspace of %lld bytes: cuDNN needs %lld", op,
                (long long)a.workspace.shape[0], (long long)(tables.tables + bytes));
  cudnnStatus_t status = cudnnSetStream(static_cast<plans *>(libraries_of(d).sdpa)->handle, stream->s);
  if (status != CUDNN_STATUS_SUCCESS)
    return fail(d, ULY_DEVICE, "cuda.%s: cudnnSetStream: %s", op, cudnnGetErrorString(status));
  if (packed) TRY(attention_upload(d, stream, &a, tables, 128, 128));
  for (const subcall &x : calls)
    TRY(execute(d, stream, x, tables, static_cast<char *>(a.workspace.data) + tables.tables, op));
  return ULY_OK;
}

bool sdpa_fits(uly_device *d, const AttentionArgs &a) {
  return !(a.cu_q ? planned_subcalls(d, a) : subcalls_of(d, a)).empty();
}

int64_t sdpa_workspace(uly_device *d, const AttentionArgs &a) {
  int64_t bytes = 0;
  for (const subcall &x : subcalls_of(d, a)) {
    if (const plan *p = d->absent ? nullptr : find(d, x.shape)) bytes = most(bytes, bytes_of(x.shape, *p));
    if (!a.cu_q) bytes = most(bytes, sdpa_bound(x.shape));
  }
  return bytes;
}

bool sdpa_plan(const sdpa_shape &shape, const std::string &properties, int sm, int64_t *workspace, std::string *text) {
  if (!library_open(LIB_CUDNN)) {
    *text = library_reason(LIB_CUDNN);
    return false;
  }
  try {
    auto gpu = std::make_shared<fe::DeviceProperties>();
    fe::error_t e = gpu->deserialize(std::vector<uint8_t>(properties.begin(), properties.end()));
    plan p;
    if (e.is_good()) e = build(p, shape, nullptr, gpu, sm);
    if (e.is_good()) e = p.graph->get_plan_name(*text);
    *workspace = p.workspace;
    if (e.is_bad()) *text = e.get_message();
    return e.is_good();
  } catch (const std::exception &e) {
    *text = e.what();
    return false;
  }
}

namespace {

bool fits(uly_device *d, const AttentionArgs &a) {
  return a.q.ndim == 3 && a.k.ndim == 3 && a.v.ndim == 3 && sdpa_fits(d, a);
}
bool fits_forward(uly_device *d, const void *args) { return fits(d, attention_args(args, false)); }
bool fits_backward(uly_device *d, const void *args) { return fits(d, attention_args(args, true)); }
int32_t checked(uly_device *d, uly_stream *s, const AttentionArgs &a) {
  TRY(attention_check(d, a));
  return sdpa_run(d, s, a);
}
int32_t forward(uly_device *d, uly_stream *s, const void *args) { return checked(d, s, attention_args(args, false)); }
int32_t backward(uly_device *d, uly_stream *s, const void *args) { return checked(d, s, attention_args(args, true)); }

} // namespace

static const RegisterKernels registered({{ULY_OP_ATTENTION_FORWARD, "cudnn", forward, fits_forward},
                                         {ULY_OP_ATTENTION_BACKWARD, "cudnn", backward, fits_backward}},
                                        true);
