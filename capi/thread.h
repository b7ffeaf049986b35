// What the library keeps for each thread of the host: the error message, and the signal mask from
// before the current call.
#ifndef ULYSSES_THREAD_H
#define ULYSSES_THREAD_H
#include <signal.h>

#include "ulysses.h"

// ULY_TEXT is the size of an error message, ULY_INFO of the text of ulysses_build_info.
enum { ULY_TEXT = 4096, ULY_INFO = 16384 };

#pragma GCC visibility push(hidden)
// uly_text and uly_info return the calling thread's buffers. uly_fresh is uly_text after clearing it.
char *uly_text(void);
char *uly_fresh(void);
char *uly_info(void);

// uly_fail writes a message and returns the status, for the C code of the library.
ulysses_status uly_fail(ulysses_status code, const char *format, const char *op, long long a,
                        long long b);

// uly_stopped is uly_fail for a callback that returned a status. The message that a call inside the
// callback has left is appended.
ulysses_status uly_stopped(ulysses_status code, const char *op, long long tile, long long tiles);

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
