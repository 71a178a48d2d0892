// SPDX-License-Identifier: Apache-2.0
// Launches of kernels on CUDA devices: their plans, as programs hold them, and call sites.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
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
  std::array<unsigned, 3> cluster{};  // 0s for none
  std::vector<std::byte> bytes;       // of all parameters, each aligned
  std::vector<std::uint32_t> starts;  // where each parameter begins
  std::vector<Address> addresses;

  bool empty() const noexcept { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  bool clustered() const noexcept { return cluster[0] != 0; }
  // "grid (4, 1, 1), block (256, 1, 1), shared 0 bytes"
  std::string text() const {
    auto extents = [](const char* what, const std::array<unsigned, 3>& of) {
      return what + std::to_string(of[0]) + ", " + std::to_string(of[1]) + ", " +
             std::to_string(of[2]) + ")";
    };
    return extents("grid (", grid) + extents(", block (", block) + ", shared " +
           std::to_string(shared_bytes) + " bytes" +
           (clustered() ? extents(", cluster (", cluster) : "");
  }
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
  static LaunchPlan of(const Attributes& held) {
    LaunchPlan plan;
    plan.scratch = numbers<std::size_t>(held.integers("scratch"));
    plan.zeroed = numbers<std::uint32_t>(held.integers("zeroed"));
    const Attributes& launches = held.dictionary("launches");
    for (const std::string& place : launches.places())
      plan.launches.push_back(launch(launches.dictionary(place)));
    // What the plan's addresses say of the call's arrays.
    std::size_t scratch = 0;
    auto at_least = [](std::size_t& most, std::size_t index) { most = std::max(most, index + 1); };
    for (std::uint32_t index : plan.zeroed) at_least(plan.results, index);
    std::array most{&plan.operands, &plan.results, &scratch};  // as Address::Of counts
    for (const Launch& each : plan.launches)
      for (const Address& address : each.addresses)
        at_least(*most[static_cast<std::size_t>(address.of)], address.index);
    if (scratch > plan.scratch.size())
      refuse("scratch memory for each address", std::to_string(plan.scratch.size()));
    return plan;
  }

 private:
  [[noreturn]] static void refuse(std::string_view expected, const std::string& got) {
    throw Error(ErrorCode::kInvalidArgument, "a kernel's launch plan", std::string(expected), got);
  }

  template <typename T>
  static T number(std::int64_t value) {
    if (!std::in_range<T>(value)) refuse("a number of its range", std::to_string(value));
    return static_cast<T>(value);
  }

  template <typename T>
  static std::vector<T> numbers(std::span<const std::int64_t> values) {
    std::vector<T> found;
    for (std::int64_t value : values) found.push_back(number<T>(value));
    return found;
  }

  static std::array<unsigned, 3> extent(const Attributes& held, std::string_view name) {
    const auto values = held.integers(name);
    if (values.size() != 3) refuse("three extents", std::to_string(values.size()));
    return {number<unsigned>(values[0]), number<unsigned>(values[1]), number<unsigned>(values[2])};
  }

  // Three numbers each: where it is written, of what, and of which.
  static std::vector<Address> addresses(std::span<const std::int64_t> values, std::size_t bytes) {
    std::vector<Address> found;
    if (values.size() % 3 != 0) refuse("three numbers an address", std::to_string(values.size()));
    for (; !values.empty(); values = values.subspan(3)) {
      const auto offset = number<std::uint32_t>(values[0]);
      if (bytes < sizeof(std::uint64_t) || offset > bytes - sizeof(std::uint64_t))
        refuse("an address inside the parameters", std::to_string(offset));
      if (values[1] < 0 || values[1] > 2)
        refuse("0, 1 or 2: an operand's, a result's or scratch memory's",
               std::to_string(values[1]));
      found.push_back(
          {offset, static_cast<Address::Of>(values[1]), number<std::uint32_t>(values[2])});
    }
    return found;
  }

  static Launch launch(const Attributes& held) {
    Launch made;
    made.entry = held.text("entry");
    made.grid = extent(held, "grid");
    made.block = extent(held, "block");
    made.shared_bytes = number<unsigned>(held.integer("shared"));
    if (held.find("cluster") != nullptr) made.cluster = extent(held, "cluster");
    const auto bytes = held.bytes("bytes");
    made.bytes.assign(bytes.begin(), bytes.end());
    made.starts = numbers<std::uint32_t>(held.integers("starts"));
    for (std::uint32_t start : made.starts)
      if (start >= bytes.size()) refuse("parameters in the bytes", std::to_string(start));
    made.addresses = addresses(held.integers("addresses"), bytes.size());
    return made;
  }
};

struct LaunchSpec {
  LaunchPlan plan;
  std::string site;
  Lanes lanes;
};

// What a variant's name, "kernel[cuda:key]", stands for.
class LaunchCallee final : public KernelCalleeBase,
                           public std::enable_shared_from_this<LaunchCallee> {
 public:
  LaunchCallee(std::string name, std::vector<Image> images, Describe describe)
      : KernelCalleeBase(std::move(describe)),
        name_(std::move(name)),
        modules_(name_, std::move(images)) {}

  std::unique_ptr<class LaunchSite> bind(LaunchSpec spec);
  const std::string& name() const noexcept override { return name_; }
  ModuleSet& modules() noexcept { return modules_; }
  OnDevice on_device() const noexcept override { return OnDevice::kNative; }

 private:
  std::string name_;
  ModuleSet modules_;
};

// A call site. run() patches addresses into a copy of the parameters on the stack and launches: no
// lock, no allocation, no Python, unless the call fails or has lanes.
class LaunchSite : Immovable {
 public:
  LaunchSite(std::shared_ptr<LaunchCallee> callee, LaunchSpec spec)
      : callee_(std::move(callee)), spec_(std::move(spec)) {}

  // Enqueues the launches of every lane on the device's stream. `scratch`: the memory of each block
  // of scratch(), which the lanes share, since they run one after another. The device's context is
  // current. Any thread. Throws Error where the call fails.
  void run(const Call& call, Device& device, std::span<const DevicePointer> scratch) try {
    const LaunchPlan& plan = spec_.plan;
    // A program that was made by hand, or damaged: a launch would get an address that is not there.
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

  // What may have gone wrong, from what the driver knows of the function; "" for nothing known.
  static std::string hint(Result result, const Launch& launch, Function function) {
    auto attribute = [function](FunctionAttribute which) {
      int value = 0;
      return driver().function_attribute(&value, which, function) == Result::kSuccess ? value : 0;
    };
    if (result == Result::kInvalidValue || result == kOutOfResources) {
      auto threads = std::uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
      int most = attribute(FunctionAttribute::kMaxThreadsPerBlock);
      if (most > 0 && threads > static_cast<std::uint64_t>(most))
        return "; the function runs with at most " + std::to_string(most) +
               " threads a block, since it uses " +
               std::to_string(attribute(FunctionAttribute::kNumRegs)) +
               " registers a thread: take a smaller block, or compile it with __launch_bounds__(" +
               std::to_string(threads) + ")";
      if (launch.shared_bytes > 0)
        return "; it has " + std::to_string(attribute(FunctionAttribute::kSharedSizeBytes)) +
               " bytes of shared memory of its own beside the dynamic ones: the device may not "
               "have "
               "so much for a block";
    }
    if (result == kMisalignedAddress)
      return "; an earlier launch read or wrote an address that is not a multiple of its type's "
             "size "
             "(vector types such as float4 ask for 16 bytes, which parts of arrays may not be "
             "aligned to). CUDA_LAUNCH_BLOCKING=1 tells which launch";
    if (result == Result::kIllegalAddress || result == Result::kLaunchFailed ||
        result == kIllegalInstruction)
      return "; work that the device was given before failed, maybe this kernel's. "
             "CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, tells which";
    return "";
  }

  std::shared_ptr<LaunchCallee> callee_;
  LaunchSpec spec_;
  PerDevice<Functions> by_ordinal_;
};

inline std::unique_ptr<LaunchSite> LaunchCallee::bind(LaunchSpec spec) {
  return std::make_unique<LaunchSite>(shared_from_this(), std::move(spec));
}

}  // namespace callgate::cuda
