// The state of NVIDIA's libraries in a device.
#include "libraries.h"

device_libraries &libraries_of(uly_device *d) {
  if (!d->libraries) d->libraries = new device_libraries;
  return *static_cast<device_libraries *>(d->libraries);
}

void libraries_close(uly_device *d) {
  device_libraries *l = static_cast<device_libraries *>(d->libraries);
  if (!l) return;
  delete l->gemm;
  delete l->sdpa;
  delete l;
  d->libraries = nullptr;
}
