// See the header.
#include "channel/sinks/names.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "core/error.h"

namespace callgate {
namespace {

// The text of the Python string literal at the start of `text`, which loses it. Of the escapes
// those of the quote, the backslash and the common control characters are undone.
std::string take_literal(std::string_view& text) {
  const char quote = text.front();
  std::string out;
  std::size_t i = 1;
  for (; i < text.size() && text[i] != quote; ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i];
      continue;
    }
    switch (text[++i]) {
      case 'n': out += '\n'; break;
      case 't': out += '\t'; break;
      case 'r': out += '\r'; break;
      case '\\':
      case '\'':
      case '"': out += text[i]; break;
      default: (out += '\\') += text[i];
    }
  }
  text.remove_prefix(i == text.size() ? i : i + 1);
  return out;
}

// The text before the first of `ends`, taken off `text`.
std::string take_until(std::string_view& text, const char* ends) {
  std::string out(text.substr(0, text.find_first_of(ends)));
  text.remove_prefix(out.size());
  return out;
}

// One key of the path: "['w']", "[0]", "[<flat index 0>]" or ".x".
std::string take_key(std::string_view& path) {
  constexpr std::string_view kFlat = "<flat index ";
  const char first = path.front();
  if (first != '[' && first != '.') return take_until(path, "");
  path.remove_prefix(1);
  if (first == '.') return take_until(path, ".[");
  std::string key;
  if (path.starts_with('\'') || path.starts_with('"')) {
    key = take_literal(path);
  } else {
    if (path.starts_with(kFlat)) path.remove_prefix(kFlat.size());
    key = take_until(path, ">]");
  }
  path.remove_prefix(std::min(path.size(), path.find(']') + 1));
  return key;
}

}  // namespace

std::string_view role_name(Role role) noexcept {
  switch (role) {
    case Role::kTangent: return "tangent";
    case Role::kCotangent: return "cotangent";
    case Role::kPrimal: break;
  }
  return "primal";
}

std::string plain_path(std::string_view path) {
  std::string out;
  while (!path.empty()) {
    if (!out.empty()) out += '/';
    out += take_key(path);
  }
  return out;
}

void check_names(std::string_view sink, const Source& source) {
  std::set<std::string> seen;
  for (std::size_t i = 0; i < source.values(); ++i) {
    std::string path = plain_path(source.leaves[i].path);
    if (seen.insert(path).second) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "the sink " + std::string(sink) + ", tap '" + source.name + "'",
                "leaves with names of their own", "two leaves '" + path + "'");
  }
}

std::string column_name(const Source& source, const LeafType& leaf) {
  std::string name = source.name;
  if (source.role != Role::kPrimal) (name += ':') += role_name(source.role);
  if (!leaf.path.empty()) (name += '/') += plain_path(leaf.path);
  return name;
}

}  // namespace callgate
