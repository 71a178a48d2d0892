// SPDX-License-Identifier: Apache-2.0
// How libraries find the driver's functions at run time.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../fake_driver/world.h"

namespace fakecuda {
namespace {

// This library's own: whatever else the process has loaded under the same names.
void* find(const std::string& name) {
  static void* own = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&find), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return own == nullptr ? nullptr : dlsym(own, name.c_str());
}

}  // namespace

FAKECUDA_API Result cuGetProcAddress_v2(const char* symbol, void** function, int, std::uint64_t,
                                        int* status) {
  // Names come without the version that headers add.
  for (const char* version : {"_v2", ""}) {
    *function = find(std::string(symbol) + version);
    if (*function != nullptr) break;
  }
  if (std::getenv("VIRTUAL_GPU_LOG") != nullptr) {
    std::fprintf(stderr, "virtual GPU: %s is %s\n", symbol,
                 *function == nullptr ? "not there" : "found");
  }
  if (status != nullptr) *status = *function == nullptr ? 1 : 0;
  return *function == nullptr ? Result::kNotFound : Result::kSuccess;
}
FAKECUDA_API Result cuGetProcAddress(const char* symbol, void** function, int version,
                                     std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
// Tables that no document describes.
FAKECUDA_API Result cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return Result::kNotSupported;
}

// Where the host finds a device's memory: for work of the other libraries that runs on a stream.
FAKECUDA_API char* virtual_gpu_memory(std::uint64_t pointer, std::size_t bytes) {
  return resolve(pointer, bytes);
}

// A name that nothing here implements: stubs.py makes one of these for each that
// the plugin may look up.
FAKECUDA_API int virtual_gpu_unsupported(const char* symbol, bool* said, int result) {
  if (!*said) std::fprintf(stderr, "virtual GPU: %s is not supported\n", symbol);
  *said = true;
  return result;
}

}  // namespace fakecuda
