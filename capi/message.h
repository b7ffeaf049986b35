// The buffers of a thread of the host: its error message, and the text of ulysses_build_info.
// thread.c allocates them.
#ifndef ULYSSES_MESSAGE_H
#define ULYSSES_MESSAGE_H
#include "ulysses.h"

// API marks a function that the library exports.
#define API __attribute__((visibility("default")))

// Bytes of an error message and of the text of ulysses_build_info, each with its final 0.
enum { ULY_ERROR_BYTES = 4096, ULY_INFO_BYTES = 16384 };

#pragma GCC visibility push(hidden)
// uly_error_buffer and uly_info_buffer return the calling thread's buffers. uly_clear_error sets
// the error message to "" and returns its buffer.
char *uly_error_buffer(void);
char *uly_clear_error(void);
char *uly_info_buffer(void);

// uly_fail writes the error message of a call that C code refuses, and returns the status.
__attribute__((format(printf, 2, 3))) ulysses_status uly_fail(ulysses_status, const char *format,
                                                              ...);

// uly_callback_failed writes the error message of a walk over tiles whose callback returned a
// status, and returns the status. It appends the message of a call that failed inside the callback.
ulysses_status uly_callback_failed(ulysses_status, const char *op, long long tile, long long tiles);
#pragma GCC visibility pop
#endif
