// SPDX-License-Identifier: Apache-2.0
// Launches of kernels on CUDA devices: their plans, as programs hold them, and call sites.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/attributes.h"
#include "core/call.h"
#include "core/error.h"
#include "core/lifetime.h"
#include "cuda/copies.h"
#include "cuda/device.h"
#include "cuda/module.h"

namespace callgate::cuda {

inline constexpr Result kOutOfResources{701}, kIllegalInstruction{715}, kMisalignedAddress{716};

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
  std::array<unsigned, 3> cluster{};  // zeros for none
  std::vector<std::byte> bytes;       // of all parameters, each aligned
  std::vector<std::uint32_t> starts;  // the start of each parameter
  std::vector<Address> addresses;

  bool empty() const noexcept { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  bool clustered() const noexcept { return cluster[0] != 0; }
  // "grid (4, 1, 1), block (256, 1, 1), shared 0 bytes"
  std::string text() const;
};

// The launches of one call, decoded once from the program's attributes
// (python/callgate/_kernel/launch.py writes them); immutable.
struct LaunchPlan {
  std::vector<Launch> launches;
  std::vector<std::size_t> scratch;   // the bytes of each block
  std::vector<std::uint32_t> zeroed;  // results
  // The minimum number of each that a call must have.
  std::size_t operands = 0, results = 0;
  // Throws Error for attributes of another form.
  static LaunchPlan of(const Attributes& held);
};

struct LaunchSpec {
  LaunchPlan plan;
  std::string site;
  Lanes lanes;
};

// The callee of a variant's name, "kernel[cuda:key]".
class LaunchCallee final : public KernelCalleeBase,
                           public std::enable_shared_from_this<LaunchCallee> {
 public:
  LaunchCallee(std::string name, std::vector<Image> images, Describe describe);

  std::unique_ptr<class LaunchSite> bind(LaunchSpec spec);
  const std::string& name() const noexcept override { return name_; }
  ModuleSet& modules() noexcept { return modules_; }
  OnDevice on_device() const noexcept override { return OnDevice::kNative; }

 private:
  std::string name_;
  ModuleSet modules_;
};

// A call site. run() writes addresses into a copy of the parameters on the stack and launches:
// without locks, allocation or Python, unless the call fails or has lanes.
class LaunchSite : Immovable {
 public:
  LaunchSite(std::shared_ptr<LaunchCallee> callee, LaunchSpec spec)
      : callee_(std::move(callee)), spec_(std::move(spec)) {}

  // Enqueues the launches of every lane on the device's stream. `scratch`: the memory of each block
  // of scratch(), shared by the lanes, which run one after another. The device's context is
  // current. Thread-safe. Throws Error if the call fails.
  void run(const Call& call, Device& device, std::span<const DevicePointer> scratch) try {
    const LaunchPlan& plan = spec_.plan;
    // Protects against handmade or damaged programs, with which a launch would get an invalid
    // address.
    if (call.operands.size() < plan.operands || call.results.size() < plan.results) [[unlikely]]
      throw Error(
          "the program's call",
          std::to_string(plan.operands) + " operands and " + std::to_string(plan.results) +
              " results at least",
          std::to_string(call.operands.size()) + " and " + std::to_string(call.results.size()));
    auto* stream = static_cast<Stream>(call.context.stream);
    const Functions& found = functions(device);
    for (std::uint32_t index : plan.zeroed) clear_on_device({&call.results[index], 1}, stream);
    if (spec_.lanes.empty()) [[likely]]
      return run_lane(call, found, stream, scratch);
    const LanesOfCall lanes(spec_.lanes, call.operands, call.results);
    std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
    for (std::int64_t lane = 0; lane < lanes->count(); ++lane) {
      lanes->select_operands(lane, call.operands, operands);
      lanes->select_results(lane, call.results, results);
      run_lane(Call{operands, results, call.context}, found, stream, scratch);
    }
  } catch (const Error& error) {
    std::string text = error.what();
    for (const std::string& prefix :
         {std::string("callgate: "), "kernel '" + callee_->name() + "': "})
      if (text.starts_with(prefix)) text.erase(0, prefix.size());
    throw Error::verbatim(error.code(), callee_->describe(text, spec_.site));
  }

  std::span<const std::size_t> scratch() const noexcept { return spec_.plan.scratch; }
  LaunchCallee& callee() const noexcept { return *callee_; }

 private:
  using Functions = std::vector<Function>;  // of each launch

  const Functions& functions(const Device& device) {
    return by_ordinal_.at(device.index(), [&] {
      auto made = std::make_unique<Functions>();
      for (const Launch& launch : spec_.plan.launches) {
        if (launch.clustered() && driver().launch_ex == nullptr)
          throw Error("clusters of blocks", "a driver of CUDA 11.8 or later",
                      "CUDA " + version_text(driver().version));
        auto [x, y, z] = launch.cluster;
        FunctionNeeds needs{launch.shared_bytes, x * y * z > 8};
        made->push_back(callee_->modules().function(device, launch.entry, needs));
      }
      return made;
    });
  }

  void run_lane(const Call& call, const Functions& functions, Stream stream,
                std::span<const DevicePointer> scratch) const {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const Launch& launch = spec_.plan.launches[i];
      if (launch.empty()) continue;
      Result result = enqueue(launch, functions[i], stream, call, scratch);
      if (result == Result::kSuccess) [[likely]]
        continue;
      const char* name = launch.clustered() ? "cuLaunchKernelEx: " : "cuLaunchKernel: ";
      throw Error(ErrorCode::kInternal, name + error_text(result) + "; " + launch.text() +
                                            hint(result, launch, functions[i]));
    }
  }

  static Result enqueue(const Launch& launch, Function function, Stream stream, const Call& call,
                        std::span<const DevicePointer> scratch) {
    SmallBuffer<std::byte, 1024> bytes(launch.bytes.size());
    SmallBuffer<void*, 64> parameters(launch.starts.size());
    std::memcpy(bytes.data(), launch.bytes.data(), launch.bytes.size());
    for (std::size_t i = 0; i < launch.starts.size(); ++i)
      parameters.data()[i] = bytes.data() + launch.starts[i];
    for (const Address& address : launch.addresses) {
      DevicePointer value = 0;
      switch (address.of) {
        case Address::Of::kScratch: value = scratch[address.index]; break;
        case Address::Of::kOperand: value = cuda::address(call.operands[address.index].data); break;
        case Address::Of::kResult: value = cuda::address(call.results[address.index].data); break;
      }
      std::memcpy(bytes.data() + address.offset, &value, sizeof(value));
    }
    const Driver& cuda = driver();
    const auto& [gx, gy, gz] = launch.grid;
    const auto& [bx, by, bz] = launch.block;
    const auto& [cx, cy, cz] = launch.cluster;
    if (!launch.clustered()) [[likely]]
      return cuda.launch(function, gx, gy, gz, bx, by, bz, launch.shared_bytes, stream,
                         parameters.data(), nullptr);
    LaunchAttribute attribute{LaunchAttributeId::kClusterDimension, {}, {cx, cy, cz}, {}};
    LaunchConfig config{gx, gy, gz, bx, by, bz, launch.shared_bytes, stream, &attribute, 1};
    return cuda.launch_ex(&config, function, parameters.data(), nullptr);
  }

  // A likely cause, from the function's attributes in the driver; "" if unknown.
  static std::string hint(Result result, const Launch& launch, Function function);

  std::shared_ptr<LaunchCallee> callee_;
  LaunchSpec spec_;
  PerDevice<Functions> by_ordinal_;
};

inline std::unique_ptr<LaunchSite> LaunchCallee::bind(LaunchSpec spec) {
  return std::make_unique<LaunchSite>(shared_from_this(), std::move(spec));
}

}  // namespace callgate::cuda
