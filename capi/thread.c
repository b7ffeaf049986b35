#include "thread.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "message.h"
#include "signals.h"

// A thread's buffers are on the heap. They are allocated at the thread's first call and freed when
// the thread ends. They are not thread-local storage: Go's runtime makes all thread-local storage
// of this library static, and a process may have only a few hundred bytes of static storage left
// when it opens the library.
struct uly_thread {
  char error[ULY_ERROR_BYTES], info[ULY_INFO_BYTES];
  struct uly_go_call *call; // the current call; NULL outside of calls
  void *stack;              // the alternate signal stack that the library installed, or NULL
  int registered;           // with the Go runtime
  int destructor_runs;
};
static _Thread_local struct uly_thread *own;
static struct uly_thread shared; // for all threads whose buffers could not be allocated
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// destroy runs when a thread ends. The Go runtime has a destructor as well, during which signals
// may still arrive. destroy therefore postpones itself twice, so that it runs after Go's.
static void destroy(void *p) {
  struct uly_thread *t = p;
  if (t->destructor_runs++ < 2 && pthread_setspecific(key, t) == 0) return;
  uly_remove_signal_stack(t->stack);
  if (own == t) own = NULL;
  free(t);
}

static void make_key(void) { pthread_key_create(&key, destroy); }

// thread returns the calling thread's data. It allocates the data at the thread's first call.
static struct uly_thread *thread(void) {
  if (own == NULL) {
    pthread_once(&once, make_key);
    own = calloc(1, sizeof *own);
    if (own == NULL) return &shared;
    pthread_setspecific(key, own);
  }
  return own;
}

char *uly_error_buffer(void) { return thread()->error; }
char *uly_info_buffer(void) { return thread()->info; }

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

API const char *ulysses_last_error(void) { return uly_error_buffer(); }

char *uly_clear_error(void) {
  char *text = uly_error_buffer();
  text[0] = 0;
  return text;
}

ulysses_status uly_fail(ulysses_status code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(uly_error_buffer(), ULY_ERROR_BYTES, format, args);
  va_end(args);
  return code;
}

ulysses_status uly_callback_failed(ulysses_status code, const char *op, long long tile,
                                   long long tiles) {
  char why[ULY_ERROR_BYTES], *text = uly_error_buffer();
  memcpy(why, text, ULY_ERROR_BYTES);
  snprintf(text, ULY_ERROR_BYTES,
           "%s: the callback returned status %d (%s) at tile %lld of %lld%s%s", op, (int)code,
           ulysses_status_string(code), tile, tiles, why[0] ? ": " : "", why);
  return code;
}

// At a thread's first call, the Go runtime registers the thread and unblocks SIGCHLD and SIGPROF.
// The registration is therefore a call of its own, after which the signals are blocked again.
void uly_enter_go(struct uly_go_call *call) {
  uly_block_signals(&call->mask);
  fegetenv(&call->mode);
  fesetenv(FE_DFL_ENV);
  struct uly_thread *t = call->thread = thread();
  if (t == &shared) return;
  if (!t->registered) {
    sigset_t ignored;
    t->registered = 1, t->stack = uly_add_signal_stack();
    uly_register_thread();
    uly_block_signals(&ignored);
  }
  call->outer = t->call;
  t->call = call;
}

void uly_leave_go(struct uly_go_call *call) {
  if (call->thread != &shared) call->thread->call = call->outer;
  fesetenv(&call->mode);
  uly_restore_signals(&call->mask);
}

void uly_enter_host(void *mask) {
  if (own == NULL || own->call == NULL) return;
  fesetenv(&own->call->mode);
  pthread_sigmask(SIG_SETMASK, &own->call->mask, mask);
}

void uly_leave_host(const void *mask) {
  if (own == NULL || own->call == NULL) return;
  fesetenv(FE_DFL_ENV);
  uly_restore_signals(mask);
}
