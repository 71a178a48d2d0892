// See the header.
#include "cuda/launch_plan.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "core/error.h"

namespace callgate::cuda {
namespace {

constexpr std::size_t kParameterAlignment = 16;  // more than any parameter's type asks for

[[noreturn]] void refuse(std::string_view expected, std::string_view got) {
  throw Error(ErrorCode::kInvalidArgument, "a kernel's launch plan", std::string(expected),
              "'" + std::string(got) + "'");
}

// The text before a separator, which is taken off `rest` with it.
std::string_view next(std::string_view& rest, char separator) {
  std::size_t end = std::min(rest.find(separator), rest.size());
  std::string_view part = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return part;
}

template <typename T>
T number(std::string_view text, int base = 10) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) refuse("a number", text);
  return value;
}

std::array<unsigned, 3> extent(std::string_view text) {
  std::array<unsigned, 3> values{};
  std::string_view rest = text;
  for (unsigned& value : values) value = number<unsigned>(next(rest, ','));
  if (!rest.empty()) refuse("three extents", text);
  return values;
}

Address address(std::string_view text, std::size_t start, std::size_t size) {
  std::string_view what = text;
  auto offset = number<std::size_t>(next(what, '='));
  if (what.empty() || size < sizeof(std::uint64_t) || offset > size - sizeof(std::uint64_t))
    refuse("an address inside its parameter", text);
  std::optional<Address::Of> of;
  if (what.front() == 'o') of = Address::Of::kOperand;
  if (what.front() == 'r') of = Address::Of::kResult;
  if (what.front() == 's') of = Address::Of::kScratch;
  if (!of) refuse("o, r or s", what);
  return {start + offset, *of, number<std::uint32_t>(what.substr(1))};
}

void add_parameter(Launch& launch, std::string_view text) {
  std::string_view hex = next(text, '@');
  if (hex.empty() || hex.size() % 2 != 0) refuse("a parameter's bytes", hex);
  std::size_t start =
      (launch.bytes.size() + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
  launch.bytes.resize(start);
  for (std::size_t i = 0; i < hex.size(); i += 2)
    launch.bytes.push_back(std::byte{number<std::uint8_t>(hex.substr(i, 2), 16)});
  launch.starts.push_back(static_cast<std::uint32_t>(start));
  while (!text.empty()) launch.addresses.push_back(address(next(text, '@'), start, hex.size() / 2));
}

Launch launch(std::string_view rest) {
  Launch made;
  made.entry = next(rest, ' ');
  made.grid = extent(next(rest, ' '));
  made.block = extent(next(rest, ' '));
  made.shared_bytes = number<unsigned>(next(rest, ' '));
  std::string_view cluster = next(rest, ' ');
  if (cluster != "-") made.cluster = extent(cluster);
  while (!rest.empty()) add_parameter(made, next(rest, ' '));
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
  if (scratch > plan.scratch.size()) refuse("scratch memory for each address", "too little");
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

LaunchPlan LaunchPlan::parse(std::string_view text) {
  LaunchPlan plan;
  for (std::string_view rest = text; !rest.empty();) {
    std::string_view statement = next(rest, ';');
    std::string_view word = next(statement, ' ');
    if (word == "launch") {
      plan.launches.push_back(launch(statement));
    } else if (word == "scratch") {
      plan.scratch.push_back(number<std::size_t>(statement));
    } else if (word == "zero") {
      plan.zeroed.push_back(number<std::uint32_t>(statement));
    } else {
      refuse("launch, scratch or zero", word);
    }
  }
  count(plan);
  return plan;
}

}  // namespace callgate::cuda
