// SPDX-License-Identifier: Apache-2.0
// Images of CUDA kernels, and the modules that devices load from them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "cuda/device.h"

namespace callgate::cuda {

// Machine code for one compute capability, or PTX.
struct Image {
  std::string code;    // PTX ends in a zero byte
  int capability = 0;  // 90 for 9.0; 0 for PTX
};

// The requirements of a launch besides the grid.
struct FunctionNeeds {
  unsigned shared_bytes = 0;  // of dynamic shared memory
  bool wide_cluster = false;  // more than 8 blocks
};

// The images of one variant of a kernel. Each device loads one at its first call, under a lock. The
// modules are unloaded when the set dies, if the driver still exists. Thread-safe.
class ModuleSet : Immovable {
 public:
  // `name` is the kernel's, for messages.
  ModuleSet(std::string name, std::vector<Image> images)
      : name_(std::move(name)), images_(std::move(images)) {}

  ~ModuleSet();

  // A function of the device's module, with the resources that a launch needs. Throws Error if no
  // image fits the device, or the driver refuses it. The device's context is current. Loading while
  // a stream is captured into a graph isn't captured.
  Function function(const Device& device, const std::string& entry, const FunctionNeeds& needs);

  // The image for a device of this capability: machine code of the same major version, the newest
  // that the device runs; otherwise PTX. Throws Error if there is none.
  const Image& choose(const Device& device) const;

 private:
  static constexpr unsigned kSharedByDefault = 48 * 1024;  // available to each function

  struct Loaded {
    const Device* device = nullptr;
    Module module = nullptr;
    std::unordered_map<std::string, unsigned> shared_bytes;  // per function, as allowed
  };

  Loaded& loaded(const Device& device);

  void allow(Loaded& module, Function function, const std::string& entry,
             const FunctionNeeds& needs) const;

  std::string name_;
  std::vector<Image> images_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Loaded>> loaded_;
};

}  // namespace callgate::cuda
