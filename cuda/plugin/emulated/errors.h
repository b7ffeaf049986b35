// The state of a host thread: its last error, its device and its own stream.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "runtime.h"

namespace uly_emulated {

// lock guards all state of the emulator: a thread that waits may run the work of any stream.
extern std::mutex lock;

struct Failure {
  cudaError_t code = cudaSuccess;
  std::string text;
  explicit operator bool() const { return code != cudaSuccess; }
};

// set_error records the code for cudaGetLastError and the text for cudaGetErrorString, for the
// calling thread. It returns the code.
cudaError_t set_error(cudaError_t code, const std::string &text = "");
inline cudaError_t set_error(const Failure &f) { return set_error(f.code, f.text); }

struct PerThread {
  cudaError_t last = cudaSuccess;
  int device = 0;
  cudaStream_t stream = nullptr; // cudaStreamPerThread, created on first use
  std::map<int, std::string> texts;
};
PerThread &this_thread();

} // namespace uly_emulated
