// Checks for the host tests beside the headers (*_test.cpp). cuda/headers_test.go compiles and runs
// the tests.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

inline int test_failures = 0;

__attribute__((format(printf, 4, 5))) inline void test_failed(const char *file, int line, const char *condition,
                                                              const char *format, ...) {
  printf("%s:%d: %s:", file, line, condition);
  va_list args;
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  printf("\n");
  if (++test_failures > 20) exit(1);
}

// CHECK(condition) or CHECK(condition, "format", …). The format must be a literal.
#define CHECK(condition, ...)                                                       \
  do {                                                                              \
    if (!(condition)) test_failed(__FILE__, __LINE__, #condition, " " __VA_ARGS__); \
  } while (0)

// test_status returns the exit status of main.
inline int test_status() {
  if (test_failures) printf("%d checks failed\n", test_failures);
  else printf("ok\n");
  return test_failures != 0;
}
