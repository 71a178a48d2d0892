// TapSpec of tap.h.
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "channel/tap.h"
#include "core/error.h"

namespace callgate {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& expected,
                         const std::string& got) {
  throw Error(ErrorCode::kInvalidArgument, "a tap's " + what, expected, got);
}

std::int64_t count(const Attributes& held, std::string_view name, std::int64_t missing = 0) {
  const std::int64_t value = held.integer(name, missing);
  if (value < 0) refuse("'" + std::string(name) + "'", "a count", std::to_string(value));
  return value;
}

Role role_of(std::string_view text) {
  if (text == "primal") return Role::kPrimal;
  if (text == "tangent") return Role::kTangent;
  if (text == "cotangent") return Role::kCotangent;
  refuse("'role'", "primal, tangent or cotangent", "'" + std::string(text) + "'");
}

// `starts` has the numbers of one shard after another.
Padded padded_of(const Attributes& held) {
  Padded padded;
  padded.leaf = static_cast<std::size_t>(count(held, "leaf"));
  const auto whole = held.integers("whole"), starts = held.integers("starts");
  padded.whole.assign(whole.begin(), whole.end());
  if (whole.empty() ? !starts.empty() : starts.size() % whole.size() != 0)
    refuse("'padded'", "starts of as many numbers as there are extents",
           std::to_string(starts.size()));
  for (auto rest = starts; !rest.empty(); rest = rest.subspan(whole.size())) {
    const auto one = rest.first(whole.size());
    padded.starts.emplace_back(one.begin(), one.end());
  }
  for (auto numbers : {starts, whole})
    for (std::int64_t number : numbers)
      if (number < 0) refuse("'padded'", "counts", std::to_string(number));
  return padded;
}

}  // namespace

TapSpec TapSpec::of(const Attributes& held, std::string description) {
  const Attributes& tap = held.dictionary("tap");
  TapSpec spec;
  spec.name = tap.text("name");
  if (tap.find("role") != nullptr) spec.role = role_of(tap.text("role"));
  spec.ordered = tap.flag("ordered");
  spec.repeated = tap.flag("repeated");
  spec.where = tap.flag("where");
  spec.on_device = tap.flag("on_device");
  spec.every = count(tap, "every", 1);
  spec.returned = static_cast<std::size_t>(count(tap, "returned"));
  const Attributes& paths = tap.dictionary("paths");
  for (const std::string& place : paths.places()) spec.paths.emplace_back(paths.text(place));
  spec.values = spec.paths.size();
  const Attributes& padded = held.dictionary("padded");
  for (const std::string& place : padded.places())
    spec.padded.push_back(padded_of(padded.dictionary(place)));
  for (const Padded& one : spec.padded) {
    if (spec.padded.size() > spec.values || one.leaf >= spec.values - spec.padded.size())
      refuse("'padded'", "a leaf of its values, which sizes follow", std::to_string(one.leaf));
  }
  spec.description = std::move(description);
  return spec;
}

}  // namespace callgate
