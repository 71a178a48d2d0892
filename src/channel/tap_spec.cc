// parse_tap_spec() of tap.h.
#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "channel/tap.h"
#include "core/error.h"

namespace callgate {
namespace {

std::int64_t number(std::string_view key, std::string_view text) {
  std::int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw Error(ErrorCode::kInvalidArgument, "a tap's '" + std::string(key) + "'", "a count",
                "'" + std::string(text) + "'");
  }
  return value;
}

bool yes_or_no(std::string_view key, std::string_view text) {
  if (text == "0" || text == "1") return text == "1";
  throw Error(ErrorCode::kInvalidArgument, "a tap's '" + std::string(key) + "'", "0 or 1",
              "'" + std::string(text) + "'");
}

Role role_of(std::string_view text) {
  if (text == "primal") return Role::kPrimal;
  if (text == "tangent") return Role::kTangent;
  if (text == "cotangent") return Role::kCotangent;
  throw Error(ErrorCode::kInvalidArgument, "a tap's 'role'", "primal, tangent or cotangent",
              "'" + std::string(text) + "'");
}

// The numbers of "1,2,3"; none for "".
std::vector<std::int64_t> numbers(std::string_view key, std::string_view text) {
  std::vector<std::int64_t> found;
  while (!text.empty()) {
    const std::string_view one = text.substr(0, text.find(','));
    found.push_back(number(key, one));
    text.remove_prefix(std::min(one.size() + 1, text.size()));
  }
  return found;
}

Padded padded_of(std::string_view key, std::string_view text) {
  auto take = [&](char end) {
    const std::string_view part = text.substr(0, text.find(end));
    text.remove_prefix(std::min(part.size() + 1, text.size()));
    return part;
  };
  Padded padded;
  padded.leaf = static_cast<std::size_t>(number(key, take(':')));
  padded.whole = numbers(key, take(':'));
  while (!text.empty()) padded.starts.push_back(numbers(key, take(';')));
  return padded;
}

void set_field(TapSpec& spec, std::string_view key, std::string_view value) {
  if (key == "name") {
    spec.name = value;
  } else if (key == "role") {
    spec.role = role_of(value);
  } else if (key == "ordered") {
    spec.ordered = yes_or_no(key, value);
  } else if (key == "repeated") {
    spec.repeated = yes_or_no(key, value);
  } else if (key == "every") {
    spec.every = number(key, value);
  } else if (key == "values") {
    spec.values = static_cast<std::size_t>(number(key, value));
  } else if (key == "returned") {
    spec.returned = static_cast<std::size_t>(number(key, value));
  } else if (key == "where") {
    spec.where = yes_or_no(key, value);
  } else if (key == "on_device") {
    spec.on_device = yes_or_no(key, value);
  } else if (key == "padded") {
    spec.padded.push_back(padded_of(key, value));
  } else if (key == "path") {
    spec.paths.emplace_back(value);
  } else {
    throw Error(ErrorCode::kInvalidArgument, "a tap's description", "a known key",
                "'" + std::string(key) + "'");
  }
}

}  // namespace

TapSpec parse_tap_spec(const std::string& text) {
  TapSpec spec;
  std::string_view rest = text;
  while (!rest.empty()) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.empty()) break;
    std::size_t equals = line.find('=');
    if (equals == std::string_view::npos) {
      throw Error(ErrorCode::kInvalidArgument, "a tap's description", "lines of key=value",
                  "'" + std::string(line) + "'");
    }
    set_field(spec, line.substr(0, equals), line.substr(equals + 1));
  }
  if (spec.paths.size() != spec.values) {
    throw Error(ErrorCode::kInvalidArgument, "a tap's description",
                std::to_string(spec.values) + " lines path=..., one a value",
                std::to_string(spec.paths.size()));
  }
  for (const Padded& padded : spec.padded) {
    if (spec.padded.size() > spec.values || padded.leaf >= spec.values - spec.padded.size()) {
      throw Error(ErrorCode::kInvalidArgument, "a tap's 'padded'",
                  "a leaf of its values, which sizes follow", std::to_string(padded.leaf));
    }
  }
  spec.description = rest;
  return spec;
}

}  // namespace callgate
