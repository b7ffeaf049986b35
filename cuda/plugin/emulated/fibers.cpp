// Fibers: stacks, and switching between them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "blocks.h"

namespace uly_emulated {

#ifdef __x86_64__
extern "C" void uly_emulated_switch(void **from, void *to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden uly_emulated_switch
.globl uly_emulated_switch
.type uly_emulated_switch, @function
uly_emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size uly_emulated_switch, .-uly_emulated_switch
)");
void change(Fiber *from, Fiber *to) { uly_emulated_switch(&from->sp, to->sp); }
void reset(Fiber *f) {
  void **top = reinterpret_cast<void **>(f->stack + f->bytes);
  top[-2] = reinterpret_cast<void *>(&fiber_main);
  f->sp = top - 8; // six registers below the return address
  memset(f->sp, 0, 6 * sizeof(void *));
}
#else
void change(Fiber *from, Fiber *to) { swapcontext(&from->context, &to->context); }
void reset(Fiber *f) {
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = f->bytes;
  f->context.uc_link = nullptr;
  makecontext(&f->context, fiber_main, 0);
}
#endif

Fiber *idle_fiber() {
  if (block.idle.empty()) {
    auto *p = static_cast<unsigned char *>(mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (p == MAP_FAILED) {
      perror("the stack of an emulated thread");
      abort();
    }
    mprotect(p, GUARD_BYTES, PROT_NONE);
    auto *f = new Fiber;
    f->stack = p + GUARD_BYTES;
    // Stacks end at different positions in a page. Otherwise the first frames of all threads would
    // compete for the same lines of the cache.
    f->bytes = STACK_BYTES - block.fibers.size() * 9 * 64 % 4096;
    reset(f);
    block.fibers.push_back(f);
    return f;
  }
  Fiber *f = block.idle.back();
  block.idle.pop_back();
  return f;
}

} // namespace uly_emulated
