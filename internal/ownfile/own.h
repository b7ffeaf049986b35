// The file that contains this code.
#pragma once

// uly_own_path returns the absolute path of the program or shared library that contains this code;
// NULL = unknown. Nothing frees it.
__attribute__((visibility("hidden"))) const char *uly_own_path(void);
