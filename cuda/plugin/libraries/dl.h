// One function for each that is called in a library, of its name, so that sources written against
// NVIDIA's headers link without the library. FORWARD(library, needed, result, name, parameters,
// arguments, failure): it passes the call on once library_open has found its library, and returns
// `failure` before. A library without a function that is `needed` counts as missing.
#pragma once

#include "libraries.h"

struct forward {
  // enters the function in its library's list
  forward(library l, const char *name, bool needed, void **slot);
  const char *name;
  bool needed;
  void **slot;
  forward *next;
};

#define FORWARD(l, needed, result, name, parameters, arguments, failure)                        \
  static void *at_##name;                                                                       \
  static forward forward_##name(l, #name, needed, &at_##name);                                  \
  extern "C" result name parameters {                                                           \
    return at_##name ? reinterpret_cast<result(*) parameters>(at_##name) arguments : (failure); \
  }
