// Signals of the host. Go code runs on the stacks of goroutines, a few kilobytes in Go's heap. The
// kernel runs a handler that was installed without SA_ONSTACK on the thread's current stack, where
// the handler would overwrite the heap. Therefore
//
//   - a thread that runs Go code blocks the host's signals (uly_hold). They arrive when the call returns, or while it runs code of the host or of MPI;
//   - threads that Go starts block them always: they inherit the mask of the thread that loads the library, which blocks signals meanwhile;
//   - a thread without an alternate stack gets one of 512 KiB for handlers with SA_ONSTACK, before Go gives it one of 32 KiB, in its heap as well.
//
// Signals of a fault (such as SIGSEGV) are never blocked. Go handles them, because a fault in Go
// code becomes a status. For a fault in C code, Go would print its goroutines and end the process
// with SIGQUIT. Therefore the library installs a handler before Go starts. Go forwards a fault in C
// code to this handler, which restores the default action, and the process dies as any C program
// does. A handler that the host has already installed stays in place, and a handler that the host
// installs later replaces Go's.
#define _GNU_SOURCE
#include "signals.h"

#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

// never are the signals that are not blocked: faults, and the signal with which Go stops threads
// for its garbage collector.
static const int never[] = {SIGSEGV, SIGBUS,  SIGFPE,  SIGILL,  SIGTRAP, SIGSYS, SIGABRT,
                            SIGURG,  SIGKILL, SIGSTOP, SIGTTIN, SIGTTOU, SIGCONT};

// ends are the signals with which users end or stop a process. If their action is the default, they
// take effect during a call.
static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP};

static sigset_t hosts; // all but never

static void fault(int sig, siginfo_t *info, void *context) {
  (void)info, (void)context;
  struct sigaction s = {.sa_handler = SIG_DFL};
  sigaction(sig, &s, NULL); // the instruction runs again and faults
}

static sigset_t loading; // mask of the thread that loads the library

// before runs before Go's constructor, which starts Go's first thread, and after runs after it:
// constructors with a priority run first.
__attribute__((constructor(101))) static void before(void) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    struct sigaction there,
        ours = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    if (sigaction(faults[i], NULL, &there) == 0 && !(there.sa_flags & SA_SIGINFO) &&
        there.sa_handler == SIG_DFL)
      sigaction(faults[i], &ours, NULL);
  }
  sigfillset(&hosts);
  for (size_t i = 0; i < sizeof never / sizeof *never; i++) sigdelset(&hosts, never[i]);
  pthread_sigmask(SIG_BLOCK, &hosts, &loading);
}

__attribute__((constructor)) static void after(void) {
  pthread_sigmask(SIG_SETMASK, &loading, NULL);
}

void uly_hold(sigset_t *old) {
  sigset_t set = hosts;
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    struct sigaction s;
    if (sigaction(ends[i], NULL, &s) == 0 && !(s.sa_flags & SA_SIGINFO) &&
        (s.sa_handler == SIG_DFL || s.sa_handler == SIG_IGN))
      sigdelset(&set, ends[i]);
  }
  pthread_sigmask(SIG_BLOCK, &set, old);
}

void uly_free(const sigset_t *old) { pthread_sigmask(SIG_SETMASK, old, NULL); }

enum { ALTERNATE = 512 << 10 };

void *uly_alternate(void) {
  stack_t s;
  if (sigaltstack(NULL, &s) != 0 || !(s.ss_flags & SS_DISABLE)) return NULL;
  void *p = mmap(NULL, ALTERNATE, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
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
