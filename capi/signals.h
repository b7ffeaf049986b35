// Blocks the host's signals around Go code. signals.c gives the reasons.
#ifndef ULYSSES_SIGNALS_H
#define ULYSSES_SIGNALS_H
#include <signal.h>

#pragma GCC visibility push(hidden)
// uly_block_signals blocks the host's signals on the calling thread and writes the previous mask to
// *old. uly_restore_signals sets the mask to *old.
void uly_block_signals(sigset_t *old);
void uly_restore_signals(const sigset_t *old);

// uly_add_signal_stack installs an alternate signal stack on the calling thread and returns it. It
// returns NULL if the thread has one, or if there is no memory. uly_remove_signal_stack frees a
// stack that it returned; NULL is allowed.
void *uly_add_signal_stack(void);
void uly_remove_signal_stack(void *stack);
#pragma GCC visibility pop
#endif
