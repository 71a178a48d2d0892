// Calls of a kernel on CUDA devices: a launch plan bound to a variant's modules.
//
// A plan is what one call launches, decoded once from the attributes that programs hold
// (python/callgate/_kernel/launch.py writes it); it is immutable.
// `LaunchCallee` is what a variant's name, "kernel[cuda:key]", stands for. Each call site of a
// program has a `LaunchSite`, whose run() patches addresses into a copy of the parameters on the
// stack and launches: no lock, no allocation, no Python, unless the call fails or has lanes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/attributes.h"
#include "core/kernel_callee.h"
#include "core/lifetime.h"
#include "cuda/device.h"
#include "cuda/module.h"

namespace callgate::cuda {

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

struct LaunchPlan {
  std::vector<Launch> launches;
  std::vector<std::size_t> scratch;   // bytes of each block
  std::vector<std::uint32_t> zeroed;  // results
  // How many of each a call must have at least.
  std::size_t operands = 0, results = 0;

  // Throws Error for attributes of another form.
  static LaunchPlan of(const Attributes& held);
};

class LaunchCallee;

// What a program says about one call of a kernel.
struct LaunchSpec {
  LaunchPlan plan;
  std::string site;
  Lanes lanes;
};

class LaunchSite : Immovable {
 public:
  LaunchSite(std::shared_ptr<LaunchCallee> callee, LaunchSpec spec)
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
  void check_counts(const Call& call) const;
  void run_lane(const Call& call, const Functions& functions, Stream stream,
                std::span<const DevicePointer> scratch) const;

  std::shared_ptr<LaunchCallee> callee_;
  LaunchSpec spec_;
  std::mutex mutex_;  // guards the filling of:
  std::array<std::atomic<const Functions*>, kMostDevices> by_ordinal_{};
};

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
