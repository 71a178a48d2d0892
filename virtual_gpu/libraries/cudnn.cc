// SPDX-License-Identifier: Apache-2.0
// libcudnn: so much that XLA's client starts. Convolutions are not supported.
#include <cstddef>

#define CUDNN extern "C" __attribute__((visibility("default")))

CUDNN int cudnnCreate(void** handle) {
  static char any;
  *handle = &any;
  return 0;
}
CUDNN int cudnnDestroy(void*) { return 0; }
CUDNN int cudnnSetStream(void*, void*) { return 0; }
CUDNN std::size_t cudnnGetVersion() { return 91000; }
CUDNN std::size_t cudnnGetCudartVersion() { return 12080; }
CUDNN int cudnnGetProperty(int what, int* value) {
  *value = what == 0 ? 9 : what == 1 ? 10 : 0;
  return 0;
}
CUDNN const char* cudnnGetErrorString(int) { return "not supported by the virtual GPU"; }
