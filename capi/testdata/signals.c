// signals.c MODE: a host with signal handlers without SA_ONSTACK, and with unreadable memory.
//   alarm     handlers that use much stack run during calls
//   mask      the thread's signal mask is the same after calls
//   default   a call on unreadable memory ends the process with SIGSEGV
//   handled   a call on unreadable memory runs the host's handler
//   kill      SIGTERM with its default action ends a process in a long call
#define _GNU_SOURCE
#include <alloca.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>
#include "host.h"

static volatile long signals;
static pthread_t host_thread;
static volatile int elsewhere;

// deep is a handler that uses 100 KB of stack.
static void deep(int sig) {
  volatile char *p = alloca(100 << 10);
  for (int i = 0; i < 100 << 10; i += 64) p[i] = (char)sig;
  signals++;
  elsewhere |= !pthread_equal(pthread_self(), host_thread);
}

static void alarms(void) {
  host_thread = pthread_self();
  int kinds[] = {SIGALRM, SIGUSR1, SIGUSR2, SIGTERM, SIGRTMIN + 3};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    CHECK(signal(kinds[i], deep) != SIG_ERR);
  ulysses_context *c;
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = 2;
  OK(ulysses_context_create_local(&o, &c));
  struct itimerval every = {{0, 300}, {0, 300}};
  CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
  results first = attention(c, 1);
  for (int i = 0; i < 300; i++) {
    results r = attention(c, 4);
    same(r, first);
    free_results(r);
    kill(getpid(), kinds[1 + i % 4]);
  }
  struct itimerval none = {{0, 0}, {0, 0}};
  setitimer(ITIMER_REAL, &none, NULL);
  CHECK(signals > 100 && !elsewhere); // signals arrive, and only on the host's thread
  printf("%ld signals\n", signals);
  free_results(first);
  ulysses_context_destroy(c);
}

static void mask(void) {
  sigset_t before, after, none;
  sigemptyset(&none), sigaddset(&none, SIGUSR2);
  CHECK(pthread_sigmask(SIG_SETMASK, &none, NULL) == 0 &&
        pthread_sigmask(SIG_SETMASK, NULL, &before) == 0);
  ulysses_context *c;
  OK(ulysses_context_create_local(NULL, &c));
  free_results(attention(c, 1));
  ulysses_context_destroy(c);
  CHECK(pthread_sigmask(SIG_SETMASK, NULL, &after) == 0);
  for (int i = 1; i < NSIG; i++) CHECK(sigismember(&before, i) == sigismember(&after, i));
}

static void fault_handler(int sig, siginfo_t *info, void *context) {
  (void)context, (void)info;
  _exit(sig == SIGSEGV ? 42 : 43);
}

// unreadable: q is in memory that the process must not read.
static void unreadable(void) {
  ulysses_context *c;
  ulysses_plan *plan;
  ulysses_batch *batch;
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.heads = H, d.head_dim = D, bd.batch = 1, bd.seq = S;
  OK(ulysses_context_create_local(NULL, &c));
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  int64_t shape[4] = {1, S, H, D};
  float *bad = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(bad != MAP_FAILED);
  static float x[3][S * H * D];
  ulysses_tensor t[4] = {floats(bad, shape), floats(x[0], shape), floats(x[1], shape),
                         floats(x[2], shape)};
  ulysses_attention_args a;
  ULYSSES_INIT(&a);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3];
  ulysses_status got = ulysses_attention_forward(plan, batch, &a);
  printf("status %d: %s\n", (int)got, ulysses_last_error());
}

static void *killer(void *arg) {
  (void)arg;
  usleep(200000);
  kill(getpid(), SIGTERM);
  return NULL;
}

static void killed(void) {
  ulysses_context *c;
  OK(ulysses_context_create_local(NULL, &c));
  pthread_t t;
  sigset_t all, old; // the other thread blocks the signal, so that the thread in the call gets it
  sigfillset(&all), pthread_sigmask(SIG_SETMASK, &all, &old),
      pthread_create(&t, NULL, killer, NULL), pthread_sigmask(SIG_SETMASK, &old, NULL);
  for (;;) free_results(attention(c, 100));
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "alarm";
  if (!strcmp(mode, "alarm")) alarms();
  if (!strcmp(mode, "mask")) mask();
  if (!strcmp(mode, "kill")) killed();
  if (!strcmp(mode, "handled")) {
    struct sigaction s;
    memset(&s, 0, sizeof s), s.sa_sigaction = fault_handler, s.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGSEGV, &s, NULL) == 0);
  }
  if (!strcmp(mode, "default") || !strcmp(mode, "handled")) unreadable();
  printf("ok %s\n", mode);
  return 0;
}
