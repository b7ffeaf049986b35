// Attention by cuDNN's graphs (its frontend, version 1): BF16, forward and backward. What it is
// asked for is in sdpa_shape.h; a plan is built when a shape is first seen, and kept.
#include "sdpa.h"

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

// Names of tensors in graphs. Offsets follow from OFFSETS on, in the order of sdpa_shape.h.
enum uid : int64_t { Q = 1, K, V, OUT, STATS, DOUT, DQ, DK, DV, LENGTHS_Q, LENGTHS_K, OFFSETS };

struct same {
  bool operator()(const sdpa_shape &a, const sdpa_shape &b) const { return memcmp(&a, &b, sizeof a) == 0; }
};
struct hash {
  size_t operator()(const sdpa_shape &s) const {
    uint64_t h = 14695981039346656037ull; // FNV-1a
    const unsigned char *p = reinterpret_cast<const unsigned char *>(&s);
    for (size_t i = 0; i < sizeof s; i++) h = (h ^ p[i]) * 1099511628211ull;
    return h;
  }
};

// describe makes the graph of a shape.
class describe {
 public:
  describe(const sdpa_shape &shape, Graph &graph) : s(shape), g(graph) {
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

  // shape [documents, heads, tokens, width]
  void lay(Tensor t, int64_t uid, int which, int64_t heads, int64_t rows, int64_t width, const sdpa_strides &x) {
    t->set_uid(uid).set_dim({s.b, heads, rows, width}).set_stride({rows * x.token, x.head, x.token, 1});
    if (s.packed) t->set_ragged_offset(offsets[which]);
  }
  Tensor input(const char *name, int64_t uid, int which, int64_t heads, int64_t rows, int64_t width,
               const sdpa_strides &x) {
    Tensor t = g.tensor(fe::graph::Tensor_attributes().set_name(name));
    lay(t, uid, which, heads, rows, width, x);
    return t;
  }
  void output(Tensor t, int64_t uid, int which, int64_t heads, int64_t rows, int64_t width, const sdpa_strides &x) {
    t->set_output(true);
    lay(t, uid, which, heads, rows, width, x);
  }
  void lay_stats(Tensor t) {
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
    lay_stats(results[1]);
  }

  void backward() {
    Tensor q = input("q", Q, SDPA_Q, s.hq, s.sq, s.d, s.q), k = input("k", K, SDPA_K, s.hkv, s.sk, s.d, s.k),
           v = input("v", V, SDPA_V, s.hkv, s.sk, s.dv, s.v);
    Tensor out = input("out", OUT, SDPA_OUT, s.hq, s.sq, s.dv, s.out),
           dout = input("dout", DOUT, SDPA_DOUT, s.hq, s.sq, s.dv, s.dout);
    Tensor stats = g.tensor(fe::graph::Tensor_attributes().set_name("stats"));
    lay_stats(stats);
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
  std::string why;                          // cuDNN does not serve it: there is no graph then
  std::unordered_map<int64_t, void *> pack; // tensors of a call, by name
};

struct plans : kept {
  cudnnHandle_t handle = nullptr;
  std::string broken; // why cuDNN does not come up on this GPU
  std::unordered_map<sdpa_shape, plan, hash, same> known;
  ~plans() override {
    known.clear();
    if (handle) cudnnDestroy(handle);
  }
};

// build goes through cuDNN's steps, for the GPU of a handle or for one that `properties` describe.
fe::error_t build(plan &p, const sdpa_shape &s, cudnnHandle_t handle, std::shared_ptr<fe::DeviceProperties> properties,
                  int sm) {
  p.graph = std::make_shared<Graph>();
  Graph &g = *p.graph;
  if (properties) g.set_sm_version(sm).set_device_properties(properties);
  describe(s, g);
  fe::error_t e = g.validate();
  if (e.is_good()) e = properties ? g.build_operation_graph() : g.build_operation_graph(handle);
  if (e.is_good()) e = g.create_execution_plans({fe::HeurMode_t::A});
  if (e.is_good()) e = properties ? g.check_support() : g.check_support(handle);
  if (e.is_good()) e = properties ? g.build_plans() : g.build_plans(handle);
  if (e.is_good()) e = g.get_workspace_size(p.workspace);
  return e;
}

// no says why cuDNN does not serve, for those who ask for it by name.
std::nullptr_t no(uly_device *d, const std::string &why) {
  fail(d, ULY_UNSUPPORTED, "cuDNN: %s", why.c_str());
  return nullptr;
}

// find is NULL when cuDNN does not come up or does not serve the shape.
plan *find(uly_device *d, const sdpa_shape &s) {
  kept *&slot = libraries_of(d).sdpa;
  if (!slot) slot = new plans;
  plans &all = *static_cast<plans *>(slot);
  if (!all.handle && all.broken.empty()) {
    const cudnnStatus_t status = cudnnCreate(&all.handle);
    if (status != CUDNN_STATUS_SUCCESS) {
      all.handle = nullptr;
      all.broken = std::string("cudnnCreate: ") + cudnnGetErrorString(status);
    }
  }
  if (!all.handle) return no(d, all.broken);
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
  return at->second.graph ? &at->second : no(d, at->second.why);
}

bool available(uly_device *d, const AttentionArgs &a) {
  if (!d->absent && !library_open(LIB_CUDNN)) no(d, library_reason(LIB_CUDNN));
  // Backward, cuDNN adds up dq in the order in which blocks come.
  else if ((d->deterministic || a.deterministic) && a.backward) no(d, "its backward pass does not repeat to the bit");
  else return true; // every GPU that opens is new enough
  return false;
}

int64_t bytes_of(const sdpa_shape &s, const plan &p) { return sdpa_lay(s).plan + p.workspace; }

// part is one of the calls that attention is cut into, with its plan.
struct part {
  AttentionArgs call;
  sdpa_shape shape;
  plan *p;
};

// asked is the calls that cuDNN is asked for; none, with the reason, where one of them is not for
// it.
std::vector<part> asked(uly_device *d, const AttentionArgs &a) {
  if (!available(d, a)) return {};
  std::vector<part> parts;
  sdpa_parts cut;
  const char *why = sdpa_cut(a, &cut);
  for (int64_t i = 0; !why && i < cut.n; i++) {
    parts.push_back({sdpa_part_of(a, cut.part[i]), {}, nullptr});
    why = sdpa_describe(parts.back().call, &parts.back().shape);
  }
  if (!why) return parts;
  no(d, std::string("not for ") + why);
  return {};
}

// serving is those of a call with documents, with a plan for each of them or none at all.
std::vector<part> serving(uly_device *d, const AttentionArgs &a) {
  std::vector<part> parts = asked(d, a);
  for (part &x : parts) {
    x.p = find(d, x.shape);
    // What was asked for before the documents were known has to do.
    if (x.p && (x.shape.packed || x.shape.b > 1) && bytes_of(x.shape, *x.p) > sdpa_bound(x.shape))
      x.p = no(d, "more workspace than is kept for documents");
    if (!x.p) return {};
  }
  return parts;
}

// execute enqueues one part. `at` is the workspace behind the tables of documents, which it shares
// with the other parts.
int32_t execute(uly_device *d, uly_stream *stream, const part &x, const AttentionLayout &tables, char *at,
                const char *op) {
  const AttentionArgs &a = x.call;
  const sdpa_shape &s = x.shape;
  plan *p = x.p;
  const sdpa_layout mine = sdpa_lay(s);
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
  const std::vector<part> parts = serving(d, a);
  if (parts.empty()) return ULY_UNSUPPORTED; // with the reason
  int64_t bytes = 0;
  bool packed = false;
  for (const part &x : parts) bytes = most(bytes, bytes_of(x.shape, *x.p)), packed = packed || x.shape.packed;
  const AttentionLayout tables = attention_layout(a, a.backward);
  if (a.workspace.shape[0] < tables.tables + bytes)
    return fail(d, ULY_INVALID_ARGUMENT, "cuda.%s: workspace of %lld bytes: cuDNN needs %lld", op,
                (long long)a.workspace.shape[0], (long long)(tables.tables + bytes));
  cudnnStatus_t status = cudnnSetStream(static_cast<plans *>(libraries_of(d).sdpa)->handle, stream->s);
  if (status != CUDNN_STATUS_SUCCESS)
    return fail(d, ULY_DEVICE, "cuda.%s: cudnnSetStream: %s", op, cudnnGetErrorString(status));
  if (packed) TRY(attention_upload(d, stream, &a, tables, 128, 128));
  for (const part &x : parts)
    TRY(execute(d, stream, x, tables, static_cast<char *>(a.workspace.data) + tables.tables, op));
  return ULY_OK;
}

bool sdpa_fits(uly_device *d, const AttentionArgs &a) { return !(a.cu_q ? serving(d, a) : asked(d, a)).empty(); }

int64_t sdpa_workspace(uly_device *d, const AttentionArgs &a) {
  int64_t bytes = 0;
  for (const part &x : asked(d, a)) {
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

static const RegisterRows registered({{ULY_OP_ATTENTION_FORWARD, "cudnn", forward, fits_forward},
                                      {ULY_OP_ATTENTION_BACKWARD, "cudnn", backward, fits_backward}},
                                     true);
