// What the host links. Each function clears the thread's error text, turns handles into numbers and
// goes through to Go (export.go), which writes the text. Nothing here looks at memory that the
// caller names.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "_cgo_export.h"
#include "signals.h"
#include "ulysses.h"

#define API __attribute__((visibility("default")))
enum { CONTEXT = 1, PLAN = 2, BATCH = 3, TEXT = 4096, INFO = 16384 };

// A thread's texts are on the heap, made at its first call and freed at its end: Go's runtime makes
// all thread-local storage of this library static, and what a process has left of that when it
// opens a library is some hundred bytes.
struct texts {
  char error[TEXT], info[INFO];
  sigset_t *host;
  void *stack;
  int known, rounds;
};
static _Thread_local struct texts *own;
static struct texts shared; // where there is no memory for a thread's own
static pthread_key_t ending;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// Runs at a thread's end. Go has such a destructor as well, during which signals may still arrive;
// this one runs after it.
static void end(void *p) {
  struct texts *t = p;
  if (t->rounds++ < 2 && pthread_setspecific(ending, t) == 0) return;
  uly_no_alternate(t->stack);
  if (own == t) own = NULL;
  free(t);
}

static void key(void) { pthread_key_create(&ending, end); }

static struct texts *texts(void) {
  if (own == NULL) {
    pthread_once(&once, key);
    own = calloc(1, sizeof *own);
    if (own == NULL) return &shared;
    pthread_setspecific(ending, own);
  }
  return own;
}

static char *fresh(void) {
  char *text = texts()->error;
  text[0] = 0;
  return text;
}

sigset_t **uly_host_mask(void) {
  static sigset_t *none;
  return own != NULL ? &own->host : &none;
}

// A call of Go code, during which the host's signals are blocked. At a thread's first call, Go
// registers the thread and changes the mask of some signals (SIGCHLD, SIGPROF); uly_first is
// therefore a separate call.
struct held {
  sigset_t old, *outer;
  struct texts *t;
};

static struct held enter(void) {
  struct held c;
  uly_hold(&c.old);
  c.t = texts();
  if (c.t == &shared) return c;
  if (!c.t->known) {
    sigset_t first;
    c.t->known = 1, c.t->stack = uly_alternate();
    uly_first();
    uly_hold(&first);
  }
  c.outer = c.t->host;
  return c;
}

static void leave(struct held *c) {
  if (c->t != &shared) c->t->host = c->outer;
  uly_free(&c->old);
}

#define GO(call)                                        \
  ({                                                    \
    struct held under = enter();                        \
    if (under.t != &shared) under.t->host = &under.old; \
    __auto_type result = (call);                        \
    leave(&under);                                      \
    result;                                             \
  })

#define H(x) ((uintptr_t)(x))
#define P(x) ((void *)(uintptr_t)(x))

// uly_fail is for the parts of the library that are C alone.
ulysses_status uly_fail(ulysses_status code, const char *format, const char *op, long long a, long long b) {
  snprintf(texts()->error, TEXT, format, op, a, b);
  return code;
}
void uly_fresh(void) { fresh(); }

// uly_stopped is uly_fail for a walk that a callback has ended: what a call inside the callback
// left as this thread's text comes with it.
ulysses_status uly_stopped(ulysses_status code, const char *op, long long tile, long long tiles) {
  char why[TEXT], *text = texts()->error;
  memcpy(why, text, TEXT);
  snprintf(text, TEXT, "%s: the callback returned status %d (%s) at tile %lld of %lld%s%s", op, (int)code,
           ulysses_status_string(code), tile, tiles, why[0] ? ": " : "", why);
  return code;
}

API uint32_t ulysses_version(void) { return ULYSSES_VERSION; }

API const char *ulysses_build_info(void) {
  char *info = texts()->info;
  GO((uly_build_info(info, INFO), 0));
  return info;
}

API const char *ulysses_status_string(ulysses_status code) {
  switch (code) {
    case ULYSSES_OK: return "ok";
    case ULYSSES_INVALID_ARGUMENT: return "invalid argument";
    case ULYSSES_INVALID_CONFIG: return "invalid configuration";
    case ULYSSES_UNSUPPORTED: return "unsupported";
    case ULYSSES_OUT_OF_MEMORY: return "out of memory";
    case ULYSSES_COMM: return "communication";
    case ULYSSES_DEVICE: return "device";
    case ULYSSES_IO: return "input/output";
    case ULYSSES_NUMERIC: return "numeric";
    case ULYSSES_INTERNAL: return "internal";
    case ULYSSES_PREEMPTED: return "preempted";
  }
  return "unknown status";
}

API const char *ulysses_last_error(void) { return texts()->error; }

API ulysses_status ulysses_context_create_local(const ulysses_options *o, ulysses_context **out) {
  return GO(uly_context_create_local(P(o), out, fresh()));
}
API ulysses_status ulysses_context_create_mpi(int64_t fcomm, const ulysses_options *o, ulysses_context **out) {
  return GO(uly_context_create_mpi(fcomm, P(o), out, fresh()));
}
API ulysses_status ulysses_context_create_host(const ulysses_host_comm *h, const ulysses_options *o,
                                               ulysses_context **out) {
  return GO(uly_context_create_host(P(h), P(o), out, fresh()));
}
API ulysses_status ulysses_context_query(const ulysses_context *c, ulysses_context_info *out) {
  return GO(uly_context_query(H(c), out, fresh()));
}
API ulysses_status ulysses_context_async_error(ulysses_context *c) {
  return GO(uly_context_async_error(H(c), fresh()));
}
API void ulysses_context_abort(ulysses_context *c, ulysses_status why) { GO(uly_context_abort(H(c), why, fresh())); }
API void ulysses_context_destroy(ulysses_context *c) { GO(uly_destroy(CONTEXT, H(c), fresh())); }

API ulysses_status ulysses_attention_plan(ulysses_context *c, const ulysses_attention_desc *d, ulysses_plan **out) {
  return GO(uly_attention_plan(H(c), P(d), out, fresh()));
}
API ulysses_status ulysses_gdn_plan(ulysses_context *c, const ulysses_gdn_desc *d, ulysses_plan **out) {
  return GO(uly_gdn_plan(H(c), P(d), out, fresh()));
}
API ulysses_status ulysses_gdn_forward(ulysses_plan *p, const ulysses_batch *b, const ulysses_gdn_args *a) {
  return GO(uly_gdn_forward(H(p), H(b), P(a), fresh()));
}
API ulysses_status ulysses_gdn_backward(ulysses_plan *p, const ulysses_batch *b, const ulysses_gdn_args *a,
                                        const ulysses_gdn_grads *g) {
  return GO(uly_gdn_backward(H(p), H(b), P(a), P(g), fresh()));
}
API const char *ulysses_plan_json(const ulysses_plan *p) { return GO(uly_plan_json(H(p), fresh())); }
API void ulysses_plan_destroy(ulysses_plan *p) { GO(uly_destroy(PLAN, H(p), fresh())); }
API ulysses_status ulysses_plan_sizes(const ulysses_plan *p, const ulysses_batch *b, ulysses_sizes *out) {
  return GO(uly_plan_sizes(H(p), H(b), out, fresh()));
}

API ulysses_status ulysses_batch_create(ulysses_context *c, const ulysses_batch_desc *d, ulysses_batch **out) {
  return GO(uly_batch_create(H(c), P(d), out, fresh()));
}
API ulysses_status ulysses_batch_query(const ulysses_batch *b, ulysses_batch_info *out) {
  return GO(uly_batch_query(H(b), out, fresh()));
}
API ulysses_status ulysses_batch_positions(const ulysses_batch *b, int64_t *out) {
  return GO(uly_batch_positions(H(b), out, fresh()));
}
API void ulysses_batch_destroy(ulysses_batch *b) { GO(uly_destroy(BATCH, H(b), fresh())); }

API ulysses_status ulysses_seq_to_heads(ulysses_plan *p, const ulysses_batch *b, const ulysses_reshard_args *a) {
  return GO(uly_reshard(H(p), H(b), P(a), 1, fresh()));
}
API ulysses_status ulysses_heads_to_seq(ulysses_plan *p, const ulysses_batch *b, const ulysses_reshard_args *a) {
  return GO(uly_reshard(H(p), H(b), P(a), 0, fresh()));
}
API ulysses_status ulysses_seq_to_heads_start(ulysses_plan *p, const ulysses_batch *b, const ulysses_reshard_args *a,
                                              ulysses_request **out) {
  return GO(uly_reshard_start(H(p), H(b), P(a), 1, out, fresh()));
}
API ulysses_status ulysses_heads_to_seq_start(ulysses_plan *p, const ulysses_batch *b, const ulysses_reshard_args *a,
                                              ulysses_request **out) {
  return GO(uly_reshard_start(H(p), H(b), P(a), 0, out, fresh()));
}
API ulysses_status ulysses_request_wait(ulysses_request *r) { return GO(uly_request_wait(H(r), fresh())); }
API ulysses_status ulysses_reshard_workspace(ulysses_plan *p, const ulysses_batch *b, const ulysses_reshard_args *a,
                                             int32_t to_heads, uint64_t *bytes) {
  return GO(uly_reshard_workspace(H(p), H(b), P(a), to_heads, bytes, fresh()));
}

API ulysses_status ulysses_halo_forward(ulysses_context *c, const ulysses_batch *b, const ulysses_halo_args *a) {
  return GO(uly_halo(H(c), H(b), P(a), 1, fresh()));
}
API ulysses_status ulysses_halo_backward(ulysses_context *c, const ulysses_batch *b, const ulysses_halo_args *a) {
  return GO(uly_halo(H(c), H(b), P(a), 0, fresh()));
}
API ulysses_status ulysses_halo_workspace(ulysses_context *c, const ulysses_batch *b, const ulysses_halo_args *a,
                                          uint64_t *bytes) {
  return GO(uly_halo_workspace(H(c), H(b), P(a), bytes, fresh()));
}
API ulysses_status ulysses_loss_reduce(ulysses_context *c, double *sum, int64_t *count, double *mean) {
  return GO(uly_loss_reduce(H(c), sum, count, mean, fresh()));
}

API ulysses_status ulysses_attention_forward(ulysses_plan *p, const ulysses_batch *b, const ulysses_attention_args *a) {
  return GO(uly_attention_forward(H(p), H(b), P(a), fresh()));
}
API ulysses_status ulysses_attention_backward(ulysses_plan *p, const ulysses_batch *b, const ulysses_attention_args *a,
                                              const ulysses_attention_grads *g) {
  return GO(uly_attention_backward(H(p), H(b), P(a), P(g), fresh()));
}
API ulysses_status ulysses_local_forward(ulysses_plan *p, const ulysses_batch *b, const ulysses_attention_args *a,
                                         ulysses_local_attention f, void *user) {
  return GO(uly_local_forward(H(p), H(b), P(a), P(f), user, fresh()));
}
API ulysses_status ulysses_local_backward(ulysses_plan *p, const ulysses_batch *b, const ulysses_attention_args *a,
                                          const ulysses_attention_grads *g, ulysses_local_attention f, void *user) {
  return GO(uly_local_backward(H(p), H(b), P(a), P(g), P(f), user, fresh()));
}
API ulysses_status ulysses_local_sizes(const ulysses_plan *p, const ulysses_batch *b, ulysses_sizes *out) {
  return GO(uly_local_sizes(H(p), H(b), out, fresh()));
}

API ulysses_status ulysses_attention_layer_sizes(const ulysses_plan *p, const ulysses_batch *b,
                                                 const ulysses_attention_layer_args *a, ulysses_sizes *out) {
  return GO(uly_attention_layer_sizes(H(p), H(b), P(a), out, fresh()));
}
API ulysses_status ulysses_attention_layer_forward(ulysses_plan *p, const ulysses_batch *b,
                                                   const ulysses_attention_layer_args *a) {
  return GO(uly_attention_layer_forward(H(p), H(b), P(a), fresh()));
}
API ulysses_status ulysses_attention_layer_backward(ulysses_plan *p, const ulysses_batch *b,
                                                    const ulysses_attention_layer_args *a,
                                                    const ulysses_attention_layer_grads *g) {
  return GO(uly_attention_layer_backward(H(p), H(b), P(a), P(g), fresh()));
}
