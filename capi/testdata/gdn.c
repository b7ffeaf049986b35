// A host in C with its own MPI: the gated delta rule and its whole layer over ranks, by heads and
// by states, with packed documents and recurrent states. Each rank's rows are compared with one
// rank's, and one rank's results with double precision.
#include "ranks.h"
#include "delta_layer.h"

// also: states without ULYSSES_STATES are refused. With ULYSSES_GDN_HEADS, a reshard with the plan
// has the heads of the plan.
static void also(const how *h, ulysses_plan *plan, const ulysses_batch *batch,
                 const ulysses_sizes *size, set *s, ulysses_gdn_args *a, ulysses_gdn_grads *g) {
  if (!h->states) {
    int64_t shape[4] = {DOCS, HV, DK, DV};
    float *x = allocate(STATE * 4);
    ulysses_tensor t = floats(x, shape);
    g->dstate_in = &t;
    IS(ulysses_gdn_backward(plan, batch, a, g), ULYSSES_INVALID_ARGUMENT);
    CHECK(strstr(ulysses_last_error(), "ULYSSES_STATES"));
    g->dstate_in = NULL;
    free(x);
  }
  int64_t mine = size->head_hi - size->head_lo, heads[4] = {B, S, mine, DV};
  float *y = allocate((uint64_t)(B * S * mine * DV) * 4);
  ulysses_tensor ty = floats(y, heads), *out = &ty;
  const ulysses_tensor *in = &s->t[V];
  ulysses_reshard_args m;
  ULYSSES_INIT(&m);
  m.n = 1, m.in = &in, m.out = &out;
  if (h->strategy == ULYSSES_GDN_STATE)
    IS(ulysses_reshard_workspace(plan, batch, &m, 1, &m.workspace_bytes), ULYSSES_INVALID_ARGUMENT);
  else {
    OK(ulysses_reshard_workspace(plan, batch, &m, 1, &m.workspace_bytes));
    m.workspace = m.workspace_bytes ? allocate(m.workspace_bytes) : NULL;
    OK(ulysses_seq_to_heads(plan, batch, &m));
    for (int64_t i = 0; i < B * S; i++)
      for (int64_t k = 0; k < mine * DV; k++)
        CHECK(y[i * mine * DV + k] == number(V, i * HV * DV + size->head_lo * DV + k));
    free(m.workspace);
  }
  free(y);
  ulysses_attention_args wrong;
  ULYSSES_INIT(&wrong);
  IS(ulysses_attention_forward(plan, batch, &wrong), ULYSSES_INVALID_ARGUMENT);
}

// layers compares whole layers on the ranks of c with a rank alone.
static void layers(ulysses_context *alone, ulysses_context *c, int size) {
  for (int normed = 0; normed < 2; normed++) {
    how h = {.strategy = ULYSSES_GDN_HEADS};
    layer_outcome whole = whole_layer(alone, &h, normed);
    if (size == 1) exact(&whole, normed); // it takes a second
    for (; h.strategy <= ULYSSES_GDN_STATE; h.strategy++) {
      layer_outcome part = whole_layer(c, &h, normed);
      for (int i = 0; i < WEIGHTS; i++)
        MPI_Allreduce(MPI_IN_PLACE, part.dw[i], (int)weight_count(i), MPI_FLOAT, MPI_SUM,
                      MPI_COMM_WORLD);
      layers_agree(h.strategy == ULYSSES_GDN_HEADS ? "layer by heads" : "layer by states", &part,
                   &whole, normed, 1, h.strategy == ULYSSES_GDN_HEADS ? 0 : CLOSE);
      free_layer(&part);
    }
    free_layer(&whole);
  }
}

// hostile: all ranks refuse invalid descriptions, and the context still works.
static void hostile(ulysses_context *c, int rank, int size) {
  ulysses_gdn_desc good, d;
  ulysses_plan *plan = NULL;
  ULYSSES_INIT(&good);
  good.dtype = ULYSSES_F32, good.qk_heads = HK, good.v_heads = HV, good.qk_dim = DK,
  good.v_dim = DV;
  IS(ulysses_gdn_plan(c, NULL, &plan), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_gdn_plan(c, &good, NULL), ULYSSES_INVALID_ARGUMENT);
  d = good, d.v_heads = HV + 1;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "multiple"));
  d = good, d.strategy = 3;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.chunk = 7;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.flags = ULYSSES_CAUSAL;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.scale = (float)NAN;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.conv_width = 257;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.flags = ULYSSES_GATED_NORM;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "conv_width"));
  d = good, d.dtype = ULYSSES_I32;
  CHECK(ulysses_gdn_plan(c, &d, &plan) != ULYSSES_OK && !plan);
  if (size > 1) {
    d = good, d.qk_dim = rank ? DK : DK + 1;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
    d = good, d.flags = rank ? ULYSSES_STATES : 0;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
    d = good, d.conv_width = 3 + rank;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
    CHECK(strstr(ulysses_last_error(), "conv_width"));
    d = good, d.strategy = rank ? ULYSSES_GDN_HEADS : ULYSSES_GDN_STATE;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  }
  IS(ulysses_gdn_forward(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  d = good, d.max_tokens = B * S;
  OK(ulysses_gdn_plan(c, &d, &plan)); // AUTO gives the reason of its choice
  CHECK(size == 1 || strstr(ulysses_plan_json(plan), "bytes"));
  ulysses_plan_destroy(plan);
}

int main(int argc, char **argv) {
  int rank, size;
  ulysses_context *alone, *c;
  open_ranks(&argc, &argv, &rank, &size, &alone, &c);
  for (int states = 0; states < 2; states++) {
    how h = {.strategy = ULYSSES_GDN_HEADS, .dtype = ULYSSES_F32, .states = states, .also = also};
    outcome whole = rule(alone, &h);
    recurrence(&whole, states);
    for (h.strategy = ULYSSES_GDN_HEADS; h.strategy <= ULYSSES_GDN_STATE; h.strategy++) {
      outcome part = rule(c, &h);
      agree(h.strategy == ULYSSES_GDN_HEADS ? "heads" : "state", &part, &whole, states,
            h.strategy == ULYSSES_GDN_HEADS ? 0 : CLOSE);
      free_outcome(&part);
    }
    free_outcome(&whole);
  }
  layers(alone, c, size);
  hostile(c, rank, size);
  ulysses_context_destroy(c), ulysses_context_destroy(alone);
  MPI_Finalize();
  if (rank == 0) printf("ok gdn %d\n", size);
  return 0;
}
