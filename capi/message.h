// The error message of a thread of the host. thread.c allocates it.
#ifndef ULYSSES_MESSAGE_H
#define ULYSSES_MESSAGE_H
#include "ulysses.h"

// API marks a function that the library exports.
#define API __attribute__((visibility("default")))

// ULY_TEXT is the size of an error message, ULY_INFO of the text of ulysses_build_info.
enum { ULY_TEXT = 4096, ULY_INFO = 16384 };

#pragma GCC visibility push(hidden)
// uly_text and uly_info return the calling thread's buffers. uly_fresh clears the message and
// returns uly_text.
char *uly_text(void);
char *uly_fresh(void);
char *uly_info(void);

// uly_fail writes a message and returns the status, for the C code of the library.
ulysses_status uly_fail(ulysses_status code, const char *format, const char *op, long long a,
                        long long b);

// uly_stopped is uly_fail for a callback that returned a status. The message that a call inside the
// callback has left is appended.
ulysses_status uly_stopped(ulysses_status code, const char *op, long long tile, long long tiles);
#pragma GCC visibility pop
#endif
