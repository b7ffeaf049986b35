// The state of a host thread: its last error, its device and its own stream.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "runtime.h"

namespace uly_emulated {

// lock guards all state of the emulator: any thread that waits may run any stream's work.
extern std::mutex lock;

struct Failure {
  cudaError_t code = cudaSuccess;
  std::string text;
  explicit operator bool() const { return code != cudaSuccess; }
};

// last keeps the code for cudaGetLastError and the text for cudaGetErrorString, of the calling thread,
// and returns the code.
cudaError_t last(cudaError_t code, const std::string &text = "");
inline cudaError_t last(const Failure &f) { return last(f.code, f.text); }

struct PerThread {
  cudaError_t last = cudaSuccess;
  int device = 0;
  cudaStream_t stream = nullptr; // cudaStreamPerThread, made at its first use
  std::map<int, std::string> texts;
};
PerThread &this_thread();

} // namespace uly_emulated
