// Signals of the host. Go code runs on the stacks of goroutines, which are a few kilobytes in Go's
// heap. The kernel runs a handler that was installed without SA_ONSTACK on the thread's current
// stack, where the handler would overwrite the heap. Therefore:
//
//   - A thread that runs Go code blocks the host's signals (uly_block_signals). The signals arrive
//     when the call returns, or while the call runs code of the host or of MPI.
//   - Threads that Go starts always block them. These threads inherit the mask of the thread that
//     loads the library, which blocks signals while Go starts.
//   - A thread without an alternate signal stack gets one of 512 KiB for handlers with SA_ONSTACK.
//     Otherwise Go would give it one of 32 KiB, which is in Go's heap.
//
// Signals of a fault (such as SIGSEGV) are never blocked. Go handles them, because a fault in Go
// code becomes a status. For a fault in C code, Go would print its goroutines and end the process
// with SIGQUIT. Therefore the library installs a handler before Go starts. Go forwards a fault in C
// code to this handler, which restores the default action, so the signal ends the process as it
// ends any C program. A handler that the host has already installed stays in place. A handler that
// the host installs later replaces Go's.
#define _GNU_SOURCE
#include "signals.h"

#include <fenv.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

// Signals that are never blocked: faults, SIGURG, with which Go stops threads for its garbage
// collector, and job control.
static const int never_blocked[] = {SIGSEGV, SIGBUS,  SIGFPE,  SIGILL,  SIGTRAP, SIGSYS, SIGABRT,
                                    SIGURG,  SIGKILL, SIGSTOP, SIGTTIN, SIGTTOU, SIGCONT};

// Signals with which users end or stop a process. They take effect during a call if their action is
// the default or SIG_IGN.
static const int user_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP};

static sigset_t host_signals; // all except never_blocked

static void handle_fault(int sig, siginfo_t *info, void *context) {
  (void)info, (void)context;
  struct sigaction s = {.sa_handler = SIG_DFL};
  sigaction(sig, &s, NULL); // the instruction runs again and faults
}

// The signal mask and the floating-point mode of the thread that loads the library. Threads inherit
// both from the thread that starts them.
static sigset_t loader_mask;
static fenv_t loader_mode;

// before_go runs before Go's constructor, which starts Go's first thread, and after_go runs after
// it: constructors with a priority run first.
__attribute__((constructor(101))) static void before_go(void) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    struct sigaction current,
        ours = {.sa_sigaction = handle_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    if (sigaction(faults[i], NULL, &current) == 0 && !(current.sa_flags & SA_SIGINFO) &&
        current.sa_handler == SIG_DFL)
      sigaction(faults[i], &ours, NULL);
  }
  sigfillset(&host_signals);
  for (size_t i = 0; i < sizeof never_blocked / sizeof *never_blocked; i++)
    sigdelset(&host_signals, never_blocked[i]);
  pthread_sigmask(SIG_BLOCK, &host_signals, &loader_mask);
  fegetenv(&loader_mode);
  fesetenv(FE_DFL_ENV);
}

__attribute__((constructor)) static void after_go(void) {
  fesetenv(&loader_mode);
  pthread_sigmask(SIG_SETMASK, &loader_mask, NULL);
}

void uly_block_signals(sigset_t *old) {
  sigset_t set = host_signals;
  for (size_t i = 0; i < sizeof user_signals / sizeof *user_signals; i++) {
    struct sigaction s;
    if (sigaction(user_signals[i], NULL, &s) == 0 && !(s.sa_flags & SA_SIGINFO) &&
        (s.sa_handler == SIG_DFL || s.sa_handler == SIG_IGN))
      sigdelset(&set, user_signals[i]);
  }
  pthread_sigmask(SIG_BLOCK, &set, old);
}

void uly_restore_signals(const sigset_t *old) { pthread_sigmask(SIG_SETMASK, old, NULL); }

enum { SIGNAL_STACK_BYTES = 512 << 10 };

void *uly_add_signal_stack(void) {
  stack_t s;
  if (sigaltstack(NULL, &s) != 0 || !(s.ss_flags & SS_DISABLE)) return NULL;
  void *p = mmap(NULL, SIGNAL_STACK_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (p == MAP_FAILED) return NULL;
  stack_t ours = {.ss_sp = p, .ss_size = SIGNAL_STACK_BYTES};
  if (sigaltstack(&ours, NULL) == 0) return p;
  munmap(p, SIGNAL_STACK_BYTES);
  return NULL;
}

void uly_remove_signal_stack(void *stack) {
  if (stack == NULL) return;
  stack_t s, none = {.ss_flags = SS_DISABLE};
  if (sigaltstack(NULL, &s) == 0 && s.ss_sp == stack) sigaltstack(&none, NULL);
  munmap(stack, SIGNAL_STACK_BYTES);
}
