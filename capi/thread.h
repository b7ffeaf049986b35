// Calls of Go code on a thread of the host, with the host's signals blocked and in the default
// floating-point mode.
#ifndef ULYSSES_THREAD_H
#define ULYSSES_THREAD_H
#include <fenv.h>
#include <signal.h>

#pragma GCC visibility push(hidden)
// A call of Go code by the calling thread. uly_enter_go blocks the host's signals, sets the default
// floating-point mode, and prepares the thread at its first call. uly_leave_go restores the signal
// mask and the mode from before the call.
//
// Results must not depend on the host's mode: worker threads have the default mode, and a host may
// round otherwise, trap exceptions, or treat denormals as zero, as programs of -ffast-math do.
struct uly_go_call {
  sigset_t mask;             // before this call
  fenv_t mode;               // before this call
  struct uly_go_call *outer; // the call around this one, or NULL
  struct uly_thread *thread;
};
void uly_enter_go(struct uly_go_call *);
void uly_leave_go(struct uly_go_call *);

// While code of the host or of MPI runs inside a call, the thread has the signal mask and the
// floating-point mode from before the call: uly_enter_host sets them and writes the mask of the
// call to *mask, a sigset_t. uly_leave_host restores the mask and the mode of the call.
void uly_enter_host(void *mask);
void uly_leave_host(const void *mask);
#pragma GCC visibility pop
#endif
