// SPDX-License-Identifier: Apache-2.0
// Launch plans, and the texts of failed launches.
#include "cuda/launch.h"

#include <algorithm>

namespace callgate::cuda {
namespace {

[[noreturn]] void refuse(std::string_view expected, const std::string& got) {
  throw Error(ErrorCode::kInvalidArgument, "a kernel's launch plan", std::string(expected), got);
}

template <typename T>
T number(std::int64_t value) {
  if (!std::in_range<T>(value)) refuse("a number of its range", std::to_string(value));
  return static_cast<T>(value);
}

template <typename T>
std::vector<T> numbers(std::span<const std::int64_t> values) {
  std::vector<T> found;
  for (std::int64_t value : values) found.push_back(number<T>(value));
  return found;
}

std::array<unsigned, 3> extent(const Attributes& held, std::string_view name) {
  const auto values = held.integers(name);
  if (values.size() != 3) refuse("three extents", std::to_string(values.size()));
  return {number<unsigned>(values[0]), number<unsigned>(values[1]), number<unsigned>(values[2])};
}

// Three numbers per address: its position, the kind of its target, and the target's index.
std::vector<Address> addresses_of(std::span<const std::int64_t> values, std::size_t bytes) {
  std::vector<Address> found;
  if (values.size() % 3 != 0) refuse("three numbers an address", std::to_string(values.size()));
  for (; !values.empty(); values = values.subspan(3)) {
    const auto offset = number<std::uint32_t>(values[0]);
    if (bytes < sizeof(std::uint64_t) || offset > bytes - sizeof(std::uint64_t))
      refuse("an address inside the parameters", std::to_string(offset));
    if (values[1] < 0 || values[1] > 2)
      refuse("0, 1 or 2: an operand's, a result's or scratch memory's", std::to_string(values[1]));
    found.push_back(
        {offset, static_cast<Address::Of>(values[1]), number<std::uint32_t>(values[2])});
  }
  return found;
}

Launch launch_of(const Attributes& held) {
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
  made.addresses = addresses_of(held.integers("addresses"), bytes.size());
  return made;
}

}  // namespace

std::string Launch::text() const {
  auto extents = [](const char* what, const std::array<unsigned, 3>& of) {
    return what + std::to_string(of[0]) + ", " + std::to_string(of[1]) + ", " +
           std::to_string(of[2]) + ")";
  };
  return extents("grid (", grid) + extents(", block (", block) + ", shared " +
         std::to_string(shared_bytes) + " bytes" +
         (clustered() ? extents(", cluster (", cluster) : "");
}

LaunchPlan LaunchPlan::of(const Attributes& held) {
  LaunchPlan plan;
  plan.scratch = numbers<std::size_t>(held.integers("scratch"));
  plan.zeroed = numbers<std::uint32_t>(held.integers("zeroed"));
  const Attributes& launches = held.dictionary("launches");
  for (const std::string& place : launches.places())
    plan.launches.push_back(launch_of(launches.dictionary(place)));
  // The call's arrays, as the plan's addresses refer to them.
  std::size_t scratch = 0;
  auto at_least = [](std::size_t& most, std::size_t index) { most = std::max(most, index + 1); };
  for (std::uint32_t index : plan.zeroed) at_least(plan.results, index);
  std::array most{&plan.operands, &plan.results, &scratch};  // in the order of Address::Of
  for (const Launch& each : plan.launches)
    for (const Address& address : each.addresses)
      at_least(*most[static_cast<std::size_t>(address.of)], address.index);
  if (scratch > plan.scratch.size())
    refuse("scratch memory for each address", std::to_string(plan.scratch.size()));
  return plan;
}

LaunchCallee::LaunchCallee(std::string name, std::vector<Image> images, Describe describe)
    : KernelCalleeBase(std::move(describe)),
      name_(std::move(name)),
      modules_(name_, std::move(images)) {}

std::string LaunchSite::hint(Result result, const Launch& launch, Function function) {
  auto attribute = [function](FunctionAttribute which) {
    int value = 0;
    return driver().function_attribute(&value, which, function) == Result::kSuccess ? value : 0;
  };
  if (result == Result::kInvalidValue || result == kOutOfResources) {
    auto threads = std::uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
    int most = attribute(FunctionAttribute::kMaxThreadsPerBlock);
    if (most > 0 && threads > static_cast<std::uint64_t>(most))
      return "; the function runs with at most " + std::to_string(most) +
             " threads a block, because it uses " +
             std::to_string(attribute(FunctionAttribute::kNumRegs)) +
             " registers a thread; use a smaller block, or compile it with __launch_bounds__(" +
             std::to_string(threads) + ")";
    if (launch.shared_bytes > 0)
      return "; it has " + std::to_string(attribute(FunctionAttribute::kSharedSizeBytes)) +
             " bytes of static shared memory beside the dynamic ones, which may exceed the "
             "device's limit for a block";
  }
  if (result == kMisalignedAddress)
    return "; an earlier launch read or wrote an address that is not a multiple of its type's "
           "size "
           "(vector types such as float4 need 16 bytes, and parts of arrays may be aligned to "
           "less). Set CUDA_LAUNCH_BLOCKING=1 to find the launch";
  if (result == Result::kIllegalAddress || result == Result::kLaunchFailed ||
      result == kIllegalInstruction)
    return "; earlier work on the device failed, maybe this kernel's. Set CUDA_LAUNCH_BLOCKING=1, "
           "or use compute-sanitizer, to find it";
  return "";
}

}  // namespace callgate::cuda
