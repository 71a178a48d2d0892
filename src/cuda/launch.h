// Calls of a kernel on CUDA devices: a launch plan bound to a variant's modules.
//
// `LaunchCallee` is what a variant's name, "kernel[cuda:key]", stands for. Each call site of a
// program has a `LaunchSite`, whose run() patches addresses into a copy of the parameters on the
// stack and launches: no lock, no allocation, no Python, unless the call fails or has lanes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/kernel_callee.h"
#include "core/lifetime.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/launch_plan.h"
#include "cuda/module.h"

namespace callgate::cuda {

class LaunchCallee;

// What a program says about one call of a kernel.
struct LaunchSpec {
  LaunchPlan plan;
  std::string site;
  Lanes lanes;
};

class LaunchSite : Immovable {
 public:
  // Throws Error for a plan that is none.
  LaunchSite(std::shared_ptr<LaunchCallee> callee, LaunchSpec spec);
  ~LaunchSite();

  // Enqueues the launches of every lane on the device's stream. `scratch`: the memory of each block
  // of scratch(), which the lanes share, since they run one after another. The device's context is
  // current. Any thread. Throws Error where the call fails.
  void run(const Call& call, Device& device, std::span<const DevicePointer> scratch);

  std::span<const std::size_t> scratch() const noexcept { return plan_.scratch; }
  LaunchCallee& callee() const noexcept { return *callee_; }

 private:
  using Functions = std::vector<Function>;  // of each launch

  const Functions& functions(const Device& device);
  void check_counts(const Call& call) const;
  void run_lanes(const Call& call, const Functions& functions, Stream stream,
                 std::span<const DevicePointer> scratch) const;
  void run_lane(const Call& call, const Functions& functions, Stream stream,
                std::span<const DevicePointer> scratch) const;

  std::shared_ptr<LaunchCallee> callee_;
  std::string site_;
  Lanes lanes_;
  LaunchPlan plan_;
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
