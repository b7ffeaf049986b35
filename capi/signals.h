// Signals of the host around Go's code: signals.c says why.
#ifndef ULYSSES_SIGNALS_H
#define ULYSSES_SIGNALS_H
#include <signal.h>

#pragma GCC visibility push(hidden)
// uly_hold blocks the host's signals on the calling thread and leaves the thread's mask in *old, for uly_free.
void uly_hold(sigset_t *old);
void uly_free(const sigset_t *old);

// uly_outside gives the thread the mask that it had before the call under way, where the host's own code or MPI runs inside of the call; uly_inside
// ends that. *inside has room for a sigset_t.
void uly_outside(void *inside);
void uly_inside(const void *inside);

// uly_alternate gives a thread without an alternate stack for signals one of the library's, and returns it; uly_no_alternate takes it back.
void *uly_alternate(void);
void uly_no_alternate(void *stack);

// uly_host_mask is where the calling thread keeps the mask from before the call under way; gate.c has it.
sigset_t **uly_host_mask(void);
#pragma GCC visibility pop
#endif
