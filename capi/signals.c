// Signals of the host. Go's code runs on goroutines' stacks, of some kilobytes in Go's heap. The kernel runs a handler that was installed without
// SA_ONSTACK on the stack where the signal finds the thread: there it writes over the heap. Therefore
//
//   - a thread that is in Go's code blocks the host's signals (uly_hold). They arrive when the call returns, or when it runs code of the host or of MPI;
//   - threads that Go starts block them for good: they take their mask from the thread that loads the library, which blocks signals meanwhile;
//   - a thread without an alternate stack gets one of 512 KiB for handlers with SA_ONSTACK, before Go gives it one of 32 KiB, in its heap as well.
//
// Signals of a fault (SIGSEGV and its like) are never blocked. Go handles them, because a fault in Go's code is a status here. Go ends the process with
// SIGQUIT and a dump of its goroutines where the fault is in C; before Go looks, the library puts a handler there that Go hands such a fault to, and
// that leaves it to the default action: the process dies as any C program does. A handler of the host that is there already stays there, and one that is
// installed later replaces Go's.
#define _GNU_SOURCE
#include "signals.h"

#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

// never are signals that are not blocked: faults, and Go's own, with which it stops threads for its collector.
static const int never[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGURG, SIGKILL, SIGSTOP, SIGTTIN, SIGTTOU, SIGCONT};

// ends are signals by which users end or stop a process. Where they are left to the default action they do so in the middle of a call.
static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP};

static sigset_t hosts; // all but never

static void fault(int sig, siginfo_t *info, void *context) {
  (void)info, (void)context;
  struct sigaction s = {.sa_handler = SIG_DFL};
  sigaction(sig, &s, NULL); // the instruction is run again
}

static sigset_t loading; // mask of the thread that loads the library

// before runs ahead of Go's own constructor, which starts Go's first thread, and after behind it: the linker has constructors with a priority first.
__attribute__((constructor(101))) static void before(void) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    struct sigaction there, ours = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    if (sigaction(faults[i], NULL, &there) == 0 && !(there.sa_flags & SA_SIGINFO) && there.sa_handler == SIG_DFL) sigaction(faults[i], &ours, NULL);
  }
  sigfillset(&hosts);
  for (size_t i = 0; i < sizeof never / sizeof *never; i++) sigdelset(&hosts, never[i]);
  pthread_sigmask(SIG_BLOCK, &hosts, &loading);
}

__attribute__((constructor)) static void after(void) { pthread_sigmask(SIG_SETMASK, &loading, NULL); }

void uly_hold(sigset_t *old) {
  sigset_t set = hosts;
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    struct sigaction s;
    if (sigaction(ends[i], NULL, &s) == 0 && !(s.sa_flags & SA_SIGINFO) && (s.sa_handler == SIG_DFL || s.sa_handler == SIG_IGN)) sigdelset(&set, ends[i]);
  }
  pthread_sigmask(SIG_BLOCK, &set, old);
}

void uly_free(const sigset_t *old) { pthread_sigmask(SIG_SETMASK, old, NULL); }

void uly_outside(void *inside) {
  sigset_t *host = *uly_host_mask();
  if (host != NULL) pthread_sigmask(SIG_SETMASK, host, inside);
}

void uly_inside(const void *inside) {
  if (*uly_host_mask() != NULL) pthread_sigmask(SIG_SETMASK, inside, NULL);
}

enum { ALTERNATE = 512 << 10 };

void *uly_alternate(void) {
  stack_t s;
  if (sigaltstack(NULL, &s) != 0 || !(s.ss_flags & SS_DISABLE)) return NULL;
  void *p = mmap(NULL, ALTERNATE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (p == MAP_FAILED) return NULL;
  stack_t ours = {.ss_sp = p, .ss_size = ALTERNATE};
  if (sigaltstack(&ours, NULL) == 0) return p;
  munmap(p, ALTERNATE);
  return NULL;
}

void uly_no_alternate(void *stack) {
  if (stack == NULL) return;
  stack_t s, none = {.ss_flags = SS_DISABLE};
  if (sigaltstack(NULL, &s) == 0 && s.ss_sp == stack) sigaltstack(&none, NULL);
  munmap(stack, ALTERNATE);
}
