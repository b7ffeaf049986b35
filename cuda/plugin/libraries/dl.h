// FORWARD defines a function with the name and parameters of a library's function, so that sources
// written against NVIDIA's headers link without the library. FORWARD(library, needed, result, name,
// parameters, arguments, failure): after library_open has found the library, the function calls the
// library's function. Before, it returns `failure`. A library without a function that is `needed`
// counts as missing.
#pragma once

#include "libraries.h"

struct library_function {
  // adds the function to its library's list
  library_function(library l, const char *name, bool needed, void **slot);
  const char *name;
  bool needed;
  void **slot;
  library_function *next;
};

#define FORWARD(l, needed, result, name, parameters, arguments, failure)                        \
  static void *at_##name;                                                                       \
  static library_function forward_##name(l, #name, needed, &at_##name);                         \
  extern "C" result name parameters {                                                           \
    return at_##name ? reinterpret_cast<result(*) parameters>(at_##name) arguments : (failure); \
  }
