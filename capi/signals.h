// Signals of the host around Go code; signals.c has the reasons.
#ifndef ULYSSES_SIGNALS_H
#define ULYSSES_SIGNALS_H
#include <signal.h>

#pragma GCC visibility push(hidden)
// uly_hold blocks the host's signals on the calling thread and leaves the thread's mask in *old,
// for uly_free.
void uly_hold(sigset_t *old);
void uly_free(const sigset_t *old);

// uly_alternate installs an alternate signal stack of the library on a thread that has none, and
// returns it; uly_no_alternate removes it.
void *uly_alternate(void);
void uly_no_alternate(void *stack);
#pragma GCC visibility pop
#endif
