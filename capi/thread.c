#include "thread.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "message.h"
#include "signals.h"

// A thread's buffers are on the heap, allocated at its first call and freed at its end. Go's runtime
// makes all thread-local storage of this library static, and a process may have only a few hundred
// bytes of static storage left when it opens the library.
struct uly_thread {
  char error[ULY_TEXT], info[ULY_INFO];
  sigset_t *host; // the mask from before the current call; NULL outside of calls
  void *stack;    // the alternate signal stack that the library installed, or NULL
  int known, rounds;
};
static _Thread_local struct uly_thread *own;
static struct uly_thread shared; // for threads for which there is no memory
static pthread_key_t ending;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// end runs at a thread's end. Go has such a destructor as well, during which signals may still
// arrive. end therefore postpones itself twice, so that it runs after Go's.
static void end(void *p) {
  struct uly_thread *t = p;
  if (t->rounds++ < 2 && pthread_setspecific(ending, t) == 0) return;
  uly_no_alternate(t->stack);
  if (own == t) own = NULL;
  free(t);
}

static void make_key(void) { pthread_key_create(&ending, end); }

static struct uly_thread *thread(void) {
  if (own == NULL) {
    pthread_once(&once, make_key);
    own = calloc(1, sizeof *own);
    if (own == NULL) return &shared;
    pthread_setspecific(ending, own);
  }
  return own;
}

char *uly_text(void) { return thread()->error; }
char *uly_info(void) { return thread()->info; }

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

API const char *ulysses_last_error(void) { return uly_text(); }

char *uly_fresh(void) {
  char *text = uly_text();
  text[0] = 0;
  return text;
}

ulysses_status uly_fail(ulysses_status code, const char *format, const char *op, long long a,
                        long long b) {
  snprintf(uly_text(), ULY_TEXT, format, op, a, b);
  return code;
}

ulysses_status uly_stopped(ulysses_status code, const char *op, long long tile, long long tiles) {
  char why[ULY_TEXT], *text = uly_text();
  memcpy(why, text, ULY_TEXT);
  snprintf(text, ULY_TEXT, "%s: the callback returned status %d (%s) at tile %lld of %lld%s%s", op,
           (int)code, ulysses_status_string(code), tile, tiles, why[0] ? ": " : "", why);
  return code;
}

// At a thread's first call, Go registers the thread and changes the mask of some signals (SIGCHLD,
// SIGPROF). The registration is therefore a call of its own, after which the signals are blocked
// again.
void uly_enter(struct uly_held *h) {
  uly_hold(&h->old);
  struct uly_thread *t = h->thread = thread();
  if (t == &shared) return;
  if (!t->known) {
    sigset_t first;
    t->known = 1, t->stack = uly_alternate();
    uly_first();
    uly_hold(&first);
  }
  h->outer = t->host;
  t->host = &h->old;
}

void uly_leave(struct uly_held *h) {
  if (h->thread != &shared) h->thread->host = h->outer;
  uly_free(&h->old);
}

void uly_outside(void *inside) {
  if (own != NULL && own->host != NULL) pthread_sigmask(SIG_SETMASK, own->host, inside);
}

void uly_inside(const void *inside) {
  if (own != NULL && own->host != NULL) uly_free(inside);
}
