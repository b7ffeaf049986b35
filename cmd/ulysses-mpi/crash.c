#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "crash.h"

static char last_words[256];
static volatile sig_atomic_t code;

// on_abort ends the process after the Go runtime has printed what crashed. Only calls that are safe
// in a handler are made.
static void on_abort(int signal_number) {
  (void)signal_number;
  if (code) {
    ssize_t ignored = write(2, last_words, strlen(last_words));
    (void)ignored;
    _exit(code);
  }
  signal(SIGABRT, SIG_DFL);
  raise(SIGABRT);
}

// The Go runtime forwards signals that it does not handle to the handler that was installed before
// it started, so this runs first.
__attribute__((constructor)) static void before_go(void) {
  struct sigaction act = {.sa_handler = on_abort, .sa_flags = SA_ONSTACK};
  sigemptyset(&act.sa_mask);
  sigaction(SIGABRT, &act, NULL);
}

void crash_code(int exit_code, const char *text) {
  strncpy(last_words, text, sizeof last_words - 1);
  code = exit_code;
}
