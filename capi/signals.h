// Signals of the host around Go code; signals.c has the reasons.
#ifndef ULYSSES_SIGNALS_H
#define ULYSSES_SIGNALS_H
#include <signal.h>

#pragma GCC visibility push(hidden)
// uly_hold blocks the host's signals on the calling thread and leaves the thread's mask in *old,
// for uly_free.
void uly_hold(sigset_t *old);
void uly_free(const sigset_t *old);

// uly_outside restores the thread's mask from before the current call, while the host's code or MPI
// runs inside the call; uly_inside reverts this. *inside has room for a sigset_t.
void uly_outside(void *inside);
void uly_inside(const void *inside);

// uly_alternate installs an alternate signal stack of the library on a thread that has none, and
// returns it; uly_no_alternate removes it.
void *uly_alternate(void);
void uly_no_alternate(void *stack);

// uly_host_mask returns the address of the calling thread's mask from before the current call;
// gate.c defines it.
sigset_t **uly_host_mask(void);
#pragma GCC visibility pop
#endif
