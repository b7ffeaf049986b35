// Calls of Go code on a thread of the host, with the host's signals blocked.
#ifndef ULYSSES_THREAD_H
#define ULYSSES_THREAD_H
#include <signal.h>

#pragma GCC visibility push(hidden)
// A call of Go code on the calling thread. uly_enter blocks the host's signals and prepares a thread
// at its first call; uly_leave restores the mask.
struct uly_held {
  sigset_t old, *outer;
  struct uly_thread *thread;
};
void uly_enter(struct uly_held *);
void uly_leave(struct uly_held *);

// uly_outside restores the thread's mask from before the current call while code of the host or of
// MPI runs inside the call; uly_inside reverts this. *inside has room for a sigset_t.
void uly_outside(void *inside);
void uly_inside(const void *inside);
#pragma GCC visibility pop
#endif
