// Calls of Go code on a thread of the host, with the host's signals blocked.
#ifndef ULYSSES_THREAD_H
#define ULYSSES_THREAD_H
#include <signal.h>

#pragma GCC visibility push(hidden)
// A call of Go code by the calling thread. uly_enter_go blocks the host's signals, and prepares the
// thread at its first call. uly_leave_go restores the signal mask from before the call.
struct uly_go_call {
  sigset_t mask, *outer; // the mask before this call, and that of the call around it, or NULL
  struct uly_thread *thread;
};
void uly_enter_go(struct uly_go_call *);
void uly_leave_go(struct uly_go_call *);

// While code of the host or of MPI runs inside a call, the thread has the signal mask from before
// the call: uly_enter_host sets it and writes the mask of the call to *mask, a sigset_t.
// uly_leave_host restores the mask of the call.
void uly_enter_host(void *mask);
void uly_leave_host(const void *mask);
#pragma GCC visibility pop
#endif
