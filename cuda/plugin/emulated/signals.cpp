// Accesses at which a GPU stops: misaligned addresses, and addresses outside of all memory.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "blocks.h"
#include "heap.h"

namespace uly_emulated {

// Kernels are compiled with -fsanitize=alignment, which checks the alignment of each access; a GPU
// checks it, x86 does not. The compiler calls __ubsan_handle_type_mismatch_v1 for a misaligned
// address. The struct and the name are defined in libsanitizer's ubsan_handlers.h.
struct Misaligned {
  const char *file;
  uint32_t line, column;
  const struct {
    uint16_t kind, info;
    char name[1];
  } *type;
  unsigned char log_alignment, access;
};
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(Misaligned *m, uintptr_t at) {
  std::string text =
      format("%s: %s at address %#llx, which is not a multiple of %d bytes", where(m->file, (int)m->line).c_str(),
             m->type->name, (unsigned long long)at, 1 << m->log_alignment);
  if (block.running) fail(text);
  fprintf(stderr, "%s\n", text.c_str()); // in host code of the plug-in
  abort();
}

// While a grid runs, an access of its thread to an invalid address becomes a failed launch: the
// thread continues in stray(), on its fiber's stack. Signals of other threads go to the previous
// handler, which is Go's.
#ifdef __x86_64__
static struct {
  struct sigaction segv, bus;
} before;
static pthread_t executor;
static const void *volatile stray_address;

[[noreturn]] static void stray() {
  auto *p = static_cast<const unsigned char *>(const_cast<const void *>(stray_address));
  const unsigned char *stack = block.running->stack;
  if (p < stack && p >= stack - GUARD_BYTES)
    fail(format("a thread uses more than %zu bytes of stack", (size_t)STACK_BYTES));
  fail("it accessed " + describe(p));
}

static void on_signal(int number, siginfo_t *info, void *context) {
  struct sigaction &old = number == SIGSEGV ? before.segv : before.bus;
  if (pthread_equal(pthread_self(), executor) && block.running) {
    stray_address = info->si_addr;
    auto *c = static_cast<ucontext_t *>(context);
    c->uc_mcontext.gregs[REG_RSP] = (greg_t)(block.running->stack + STACK_BYTES - 8);
    c->uc_mcontext.gregs[REG_RIP] = (greg_t)&stray;
  } else if (old.sa_flags & SA_SIGINFO) {
    old.sa_sigaction(number, info, context);
  } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
    old.sa_handler(number);
  } else {
    sigaction(number, &old, nullptr); // the signal then occurs again
  }
}

Signals::Signals() {
  executor = pthread_self();
  struct sigaction a{};
  a.sa_sigaction = on_signal;
  a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigfillset(&a.sa_mask);
  sigdelset(&a.sa_mask, SIGSEGV);
  sigdelset(&a.sa_mask, SIGBUS);
  sigaction(SIGSEGV, &a, &before.segv);
  sigaction(SIGBUS, &a, &before.bus);
}
Signals::~Signals() {
  sigaction(SIGSEGV, &before.segv, nullptr);
  sigaction(SIGBUS, &before.bus, nullptr);
}
#else
static pthread_t executor;
Signals::Signals() { executor = pthread_self(); }
Signals::~Signals() {}
#endif

bool in_kernel() { return block.running && pthread_equal(pthread_self(), executor); }

} // namespace uly_emulated
