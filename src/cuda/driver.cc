// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "core/error.h"
#include "cuda/device.h"

namespace callgate::cuda {
namespace {

constexpr int kOldestVersion = 11040;
constexpr const char* kWhere = "CUDA's driver";

std::atomic<const Driver*> loaded{nullptr};

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void* open_library(const char* where, const std::string& path, const std::string& what) {
  if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  const char* reason = dlerror();
  throw Error(ErrorCode::kNotFound, where, what, reason == nullptr ? "none" : reason);
}

void* look_up(void* library, const char* symbol, std::string& missing) {
  void* function = dlsym(library, symbol);
  if (function == nullptr) missing.append(" ").append(symbol);
  return function;
}

Driver load_driver(const std::string& path) {
  void* library =
      open_library(kWhere, path, "the library '" + path + "', which comes with NVIDIA's driver");
  Driver table;
  std::string missing, unused;
#define X(member, symbol, arguments) \
  table.member = reinterpret_cast<decltype(table.member)>(look_up(library, symbol, missing));
  CALLGATE_CUDA_FUNCTIONS(X)
#undef X
#define X(member, symbol, arguments) \
  table.member = reinterpret_cast<decltype(table.member)>(look_up(library, symbol, unused));
  CALLGATE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  if (!missing.empty())
    throw Error(ErrorCode::kNotFound, kWhere,
                "'" + path + "' of CUDA " + version_text(kOldestVersion) + " or later",
                "one that lacks" + missing);
  auto expect = [&](Result result, const char* what) {
    if (result == Result::kSuccess) return;
    throw Error(ErrorCode::kInternal, kWhere, std::string(what) + " of '" + path + "' to succeed",
                "error " + std::to_string(static_cast<int>(result)) +
                    (result == Result::kNoDevice ? ": no GPU is visible to this process" : ""));
  };
  expect(table.init(0), "cuInit");
  expect(table.driver_version(&table.version), "cuDriverGetVersion");
  if (table.version < kOldestVersion)
    throw Error(ErrorCode::kNotFound, kWhere, "CUDA " + version_text(kOldestVersion) + " or later",
                version_text(table.version) + "; update NVIDIA's driver");
  int devices = 0;
  expect(table.device_count(&devices), "cuDeviceGetCount");
  if (devices == 0)
    throw Error(ErrorCode::kNotFound, kWhere, "a GPU that this process can see", "none");
  return table;
}

const Driver* loaded_driver() noexcept {
  return loaded.load(std::memory_order_acquire);  // the table was completed before
}

const Driver& driver() {
  if (const Driver* known = loaded_driver()) [[likely]]
    return *known;
  static constinit std::mutex mutex;
  std::lock_guard lock(mutex);
  if (const Driver* known = loaded_driver()) return *known;
  const char* path = std::getenv("CALLGATE_CUDA_DRIVER");
  auto table = std::make_unique<Driver>(load_driver(path != nullptr ? path : "libcuda.so.1"));
  loaded.store(table.get(), std::memory_order_release);  // see above
  return *table.release();                               // NOLINT: never destroyed
}

std::string error_text(Result result) {
  const Driver* table = loaded_driver();
  const char *name = nullptr, *text = nullptr;
  if (table != nullptr && table->error_name(result, &name) == Result::kSuccess &&
      table->error_string(result, &text) == Result::kSuccess && name != nullptr)
    return std::string(name) + (text != nullptr ? " (" + std::string(text) + ")" : "");
  return "CUDA error " + std::to_string(static_cast<int>(result));
}

void check(Result result, const char* what) {
  if (result == Result::kSuccess) [[likely]]
    return;
  throw DriverError(
      result == Result::kOutOfMemory ? ErrorCode::kResourceExhausted : ErrorCode::kInternal,
      std::string(what) + ": " + error_text(result));
}

}  // namespace callgate::cuda
