// Several devices in one process: what belongs to one of them, and calls that need the current one.
#include "emulated_test.h"

__global__ void nothing(int) {}

// A kernel runs on the current device only, in a stream of it, with the shared memory that was
// allowed there; an event is recorded in streams of its own device, and all devices wait for it.
void devices() {
  setenv("ULYSSES_EMULATED_DEVICES", "2", 1);
  const auto refused = [](cudaError_t code, const char *word) {
    EXPECT(cudaGetLastError() == code, "no error, or another one");
    std::string text = cudaGetErrorString(code);
    EXPECT(text.find(word) != std::string::npos, "%s", text.c_str());
  };
  Stream *first = stream();
  cudaEvent_t of_first = event();
  FINE(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
  LAUNCH(nothing, 1, 32, 64 << 10, first, 0);
  FINE(cudaGetLastError());

  FINE(cudaSetDevice(1));
  Stream *second = stream();
  LAUNCH(nothing, 1, 32, 0, first, 0);
  refused(cudaErrorInvalidResourceHandle, "in a stream of device 0 while device 1 is the current one");
  LAUNCH(nothing, 1, 32, 64 << 10, second, 0);
  refused(cudaErrorInvalidConfiguration, "cudaFuncSetAttribute");
  FINE(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
  LAUNCH(nothing, 1, 32, 64 << 10, second, 0);
  FINE(cudaGetLastError());
  EXPECT(cudaEventRecord(of_first, second->s) == cudaErrorInvalidResourceHandle, "an event of another device");
  refused(cudaErrorInvalidResourceHandle, "an event of device 0 is recorded in a stream of device 1");

  // The current device has no influence on these.
  FINE(cudaEventRecord(of_first, first->s));
  FINE(cudaStreamWaitEvent(second->s, of_first, 0));
  int x = 1, *p = device<int>(1);
  FINE(cudaMemcpyAsync(p, &x, sizeof x, cudaMemcpyHostToDevice, first->s));
  FINE(cudaMemsetAsync(p, 0, sizeof x, first->s));
  FINE(cudaStreamSynchronize(first->s));
  FINE(cudaStreamSynchronize(second->s));
  FINE(cudaSetDevice(0));
  unsetenv("ULYSSES_EMULATED_DEVICES");
}

// A kernel accesses the memory of another device if its own device may, which the two must support.
void peers() {
  setenv("ULYSSES_EMULATED_DEVICES", "2", 1);
  int *of_first = device<int>(1), can = 1;
  FINE(cudaMemset(of_first, 0, sizeof *of_first));
  FINE(cudaDeviceSynchronize());
  FINE(cudaSetDevice(1));
  setenv("ULYSSES_EMULATED_PEERS", "0", 1);
  FINE(cudaDeviceCanAccessPeer(&can, 1, 0));
  EXPECT(!can && cudaDeviceEnablePeerAccess(0, 0) == cudaErrorPeerAccessUnsupported, "access without support");
  unsetenv("ULYSSES_EMULATED_PEERS");
  FINE(cudaDeviceCanAccessPeer(&can, 1, 0));
  EXPECT(can, "no access with support");
  cudaGetLastError();

  Stream *without = stream();
  LAUNCH(plus, 1, 32, 0, without, of_first, 1);
  fails(without, cudaErrorLaunchFailure, {"plus", "in memory of device 0, to which this device has no access"});
  FINE(cudaDeviceEnablePeerAccess(0, 0));
  EXPECT(cudaDeviceEnablePeerAccess(0, 0) == cudaErrorPeerAccessAlreadyEnabled, "enabled twice");
  cudaGetLastError();
  Stream *with = stream();
  LAUNCH(plus, 1, 32, 0, with, of_first, 1);
  EXPECT(read(with, of_first, 1)[0] == 1, "the kernel has not written");

  // the other direction is separate
  int *of_second = device<int>(1);
  FINE(cudaSetDevice(0));
  Stream *first = stream();
  LAUNCH(plus, 1, 32, 0, first, of_second, 1);
  fails(first, cudaErrorLaunchFailure, {"in memory of device 1"});
  unsetenv("ULYSSES_EMULATED_DEVICES");
}
