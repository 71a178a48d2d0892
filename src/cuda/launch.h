// Kernels on CUDA devices: images, the modules that they are loaded as, and launches.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/attributes.h"
#include "core/call.h"
#include "core/lifetime.h"
#include "cuda/device.h"

namespace callgate::cuda {

// Machine code for one compute capability, or PTX.
struct Image {
  std::string code;    // PTX ends in a zero byte
  int capability = 0;  // 90 for 9.0; 0 for PTX
};

// What a launch asks of its function beside the grid.
struct FunctionNeeds {
  unsigned shared_bytes = 0;  // of dynamic shared memory
  bool wide_cluster = false;  // more than 8 blocks
};

// The images of one variant of a kernel. Each device that calls it loads one, when it first does,
// under a lock; the modules are unloaded when the set dies, if the driver still lives. Any thread.
class ModuleSet : Immovable {
 public:
  // `name`: the kernel, for messages.
  ModuleSet(std::string name, std::vector<Image> images)
      : name_(std::move(name)), images_(std::move(images)) {}
  ~ModuleSet();

  // A function of the device's module, allowed to have what a launch needs. Throws Error where no
  // image fits the device, or the driver refuses it. The device's context is current.
  Function function(const Device& device, const std::string& entry, const FunctionNeeds& needs);

  // The image for a device of this capability: machine code of the same major version, the newest
  // that the device runs; else PTX. Throws Error where there is none.
  const Image& choose(const Device& device) const;

 private:
  struct Loaded {
    const Device* device = nullptr;
    Module module = nullptr;
    std::unordered_map<std::string, unsigned> shared_bytes;  // that functions are allowed to have
  };
  Loaded& loaded(const Device& device);
  void allow(Loaded& module, Function function, const std::string& entry,
             const FunctionNeeds& needs) const;

  std::string name_;
  std::vector<Image> images_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Loaded>> loaded_;
};

// An address that a call fills in.
struct Address {
  enum class Of : std::uint8_t { kOperand, kResult, kScratch };
  std::size_t offset = 0;  // in the launch's bytes
  Of of = Of::kOperand;
  std::uint32_t index = 0;
};

struct Launch {
  std::string entry;
  std::array<unsigned, 3> grid{}, block{};
  unsigned shared_bytes = 0;
  std::array<unsigned, 3> cluster{};  // 0s for none
  std::vector<std::byte> bytes;       // of all parameters, each aligned
  std::vector<std::uint32_t> starts;  // where each parameter begins
  std::vector<Address> addresses;

  bool empty() const noexcept { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  bool clustered() const noexcept { return cluster[0] != 0; }
  // "grid (4, 1, 1), block (256, 1, 1), shared 0 bytes"
  std::string text() const;
};

// What one call launches, decoded once from the attributes that programs hold
// (python/callgate/_kernel/launch.py writes it); immutable.
struct LaunchPlan {
  std::vector<Launch> launches;
  std::vector<std::size_t> scratch;   // bytes of each block
  std::vector<std::uint32_t> zeroed;  // results
  // How many of each a call must have at least.
  std::size_t operands = 0, results = 0;
  // Throws Error for attributes of another form.
  static LaunchPlan of(const Attributes& held);
};

// What a program says about one call of a kernel.
struct LaunchSpec {
  LaunchPlan plan;
  std::string site;
  Lanes lanes;
};

// A call site. run() patches addresses into a copy of the parameters on the stack and launches: no
// lock, no allocation, no Python, unless the call fails or has lanes.
class LaunchSite : Immovable {
 public:
  LaunchSite(std::shared_ptr<class LaunchCallee> callee, LaunchSpec spec)
      : callee_(std::move(callee)), spec_(std::move(spec)) {}
  ~LaunchSite();

  // Enqueues the launches of every lane on the device's stream. `scratch`: the memory of each block
  // of scratch(), which the lanes share, since they run one after another. The device's context is
  // current. Any thread. Throws Error where the call fails.
  void run(const Call& call, Device& device, std::span<const DevicePointer> scratch);
  std::span<const std::size_t> scratch() const noexcept { return spec_.plan.scratch; }
  LaunchCallee& callee() const noexcept { return *callee_; }

 private:
  using Functions = std::vector<Function>;  // of each launch

  const Functions& functions(const Device& device);
  void run_lane(const Call& call, const Functions& functions, Stream stream,
                std::span<const DevicePointer> scratch) const;

  std::shared_ptr<LaunchCallee> callee_;
  LaunchSpec spec_;
  std::mutex mutex_;  // guards the filling of:
  std::array<std::atomic<const Functions*>, kMostDevices> by_ordinal_{};
};

// What a variant's name, "kernel[cuda:key]", stands for.
class LaunchCallee final : public KernelCalleeBase,
                           public std::enable_shared_from_this<LaunchCallee> {
 public:
  LaunchCallee(std::string name, std::vector<Image> images, Describe describe)
      : KernelCalleeBase(std::move(describe)),
        name_(std::move(name)),
        modules_(name_, std::move(images)) {}

  std::unique_ptr<LaunchSite> bind(LaunchSpec spec) {
    return std::make_unique<LaunchSite>(shared_from_this(), std::move(spec));
  }

  const std::string& name() const noexcept override { return name_; }
  ModuleSet& modules() noexcept { return modules_; }
  OnDevice on_device() const noexcept override { return OnDevice::kNative; }

 private:
  std::string name_;
  ModuleSet modules_;
};

}  // namespace callgate::cuda
