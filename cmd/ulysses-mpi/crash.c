#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "crash.h"

static char prefix[160];
static volatile sig_atomic_t code;

static const char no_process[] =
    "the system allows no more threads or processes; raise the limit of this user (ulimit -u) or "
    "container (docker run --pids-limit)\n";
static const char no_memory[] =
    "the system gives no more memory; raise the limit of the address space (ulimit -v), make the "
    "job smaller or use more ranks\n";
static const char unknown[] = "the program crashed: please report the lines above\n";

// reason returns why the program crashed. The Go runtime aborts if it gets no thread or no memory.
static const char *reason(void) {
  pid_t child = vfork();
  if (child == 0) _exit(0);
  if (child < 0 && errno == EAGAIN) return no_process;
  // the stack of a thread
  void *stack = mmap(NULL, 16 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return stack == MAP_FAILED ? no_memory : unknown;
}

static struct sigaction runtime_action; // of the Go runtime, which prints the stacks

// on_abort ends the process after the Go runtime has printed what crashed. Only calls that are safe
// in a handler are made.
static void on_abort(int signal_number, siginfo_t *info, void *context) {
  static atomic_flag printed = ATOMIC_FLAG_INIT, ending = ATOMIC_FLAG_INIT;
  if (!code) {
    signal(SIGABRT, SIG_DFL);
    raise(SIGABRT);
    return;
  }
  const char *why = reason();
  if (why == unknown && runtime_action.sa_sigaction && !atomic_flag_test_and_set(&printed)) {
    runtime_action.sa_sigaction(signal_number, info, context); // raises SIGABRT again
  }
  while (atomic_flag_test_and_set(&ending)) pause(); // another thread has crashed too
  ssize_t ignored = write(2, prefix, strlen(prefix));
  ignored = write(2, why, strlen(why));
  (void)ignored;
  _exit(code);
}

static void handle(struct sigaction *old) {
  struct sigaction act = {.sa_sigaction = on_abort, .sa_flags = SA_ONSTACK | SA_SIGINFO};
  sigfillset(&act.sa_mask); // as the runtime's
  sigaction(SIGABRT, &act, old);
}

// The Go runtime forwards signals that it does not handle to the handler that was installed before
// it started, so this runs first.
__attribute__((constructor)) static void before_go(void) { handle(NULL); }

// If there are no threads or no memory, stacks do not help, and the runtime prints them for 10 s.
// Therefore the handler also comes before the runtime's.
void crash_code(int exit_code, const char *text) {
  strncpy(prefix, text, sizeof prefix - 1);
  code = exit_code;
  handle(&runtime_action);
}
