// See the header.
#include "cuda/launch_plan.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"

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

// Three numbers each: where it is written, of what, and of which.
std::vector<Address> addresses(std::span<const std::int64_t> values, std::size_t bytes) {
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

Launch launch(const Attributes& held) {
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

// What the plan's addresses say of the call's arrays.
void count(LaunchPlan& plan) {
  auto at_least = [](std::size_t& most, std::uint32_t index) {
    most = std::max<std::size_t>(most, std::size_t{index} + 1);
  };
  for (std::uint32_t index : plan.zeroed) at_least(plan.results, index);
  std::size_t scratch = 0;
  for (const Launch& each : plan.launches) {
    for (const Address& address : each.addresses) {
      if (address.of == Address::Of::kOperand) at_least(plan.operands, address.index);
      if (address.of == Address::Of::kResult) at_least(plan.results, address.index);
      if (address.of == Address::Of::kScratch) at_least(scratch, address.index);
    }
  }
  if (scratch > plan.scratch.size())
    refuse("scratch memory for each address", std::to_string(plan.scratch.size()));
}

void append(std::string& text, const char* what, const std::array<unsigned, 3>& extent) {
  text.append(what).append(" (").append(std::to_string(extent[0])).append(", ");
  text.append(std::to_string(extent[1])).append(", ").append(std::to_string(extent[2])).append(")");
}

}  // namespace

std::string Launch::text() const {
  std::string text;
  append(text, "grid", grid);
  append(text, ", block", block);
  text.append(", shared ").append(std::to_string(shared_bytes)).append(" bytes");
  if (clustered()) append(text, ", cluster", cluster);
  return text;
}

LaunchPlan LaunchPlan::of(const Attributes& held) {
  LaunchPlan plan;
  plan.scratch = numbers<std::size_t>(held.integers("scratch"));
  plan.zeroed = numbers<std::uint32_t>(held.integers("zeroed"));
  const Attributes& launches = held.dictionary("launches");
  for (const std::string& place : launches.places())
    plan.launches.push_back(launch(launches.dictionary(place)));
  count(plan);
  return plan;
}

}  // namespace callgate::cuda
