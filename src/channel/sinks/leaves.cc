// SPDX-License-Identifier: Apache-2.0
// Paths of leaves as names in files.
#include "channel/sinks/leaves.h"

#include <algorithm>
#include <set>
#include <utility>

namespace callgate {
namespace {

// Removes the Python string literal at the start of `text` and returns its content. Resolves the
// escapes of the quote, the backslash and the common control characters.
std::string take_path_literal(std::string_view& text) {
  constexpr std::string_view kWritten = "ntr\\'\"", kMeant = "\n\t\r\\'\"";
  const char quote = text.front();
  std::string out;
  std::size_t i = 1;
  for (; i < text.size() && text[i] != quote; ++i) {
    const bool escapes = text[i] == '\\' && i + 1 < text.size();
    const std::size_t escape = escapes ? kWritten.find(text[i + 1]) : std::string_view::npos;
    out += escape == std::string_view::npos ? text[i] : kMeant[escape];
    if (escape != std::string_view::npos) ++i;
  }
  text.remove_prefix(std::min(i + 1, text.size()));
  return out;
}

// Removes the text before the first of `ends` and returns it.
std::string take_path_until(std::string_view& text, const char* ends) {
  std::string out(text.substr(0, text.find_first_of(ends)));
  text.remove_prefix(out.size());
  return out;
}

// One key of the path: "['w']", "[0]", "[<flat index 0>]" or ".x".
std::string take_path_key(std::string_view& path) {
  constexpr std::string_view kFlat = "<flat index ";
  const char first = path.front();
  if (first != '[' && first != '.') return take_path_until(path, "");
  path.remove_prefix(1);
  if (first == '.') return take_path_until(path, ".[");
  if (path.starts_with(kFlat)) path.remove_prefix(kFlat.size());
  const bool quoted = path.starts_with('\'') || path.starts_with('"');
  std::string key = quoted ? take_path_literal(path) : take_path_until(path, ">]");
  path.remove_prefix(std::min(path.size(), path.find(']') + 1));
  return key;
}

std::string column_name(const Source& source, const LeafType& leaf) {
  std::string name = source.name;
  if (source.role != Role::kPrimal) (name += ':') += role_name(source.role);
  if (!leaf.path.empty()) (name += '/') += plain_path(leaf.path);
  return name;
}

}  // namespace

std::optional<LeafPart> part_of(const Record& record, std::size_t leaf) {
  const Source& source = *record.source;
  const std::int64_t shard = record.shard();
  if (shard < 0 || leaf >= source.parts.size()) return std::nullopt;
  const Parts& parts = source.parts[leaf];
  const std::vector<std::int64_t>& dims = source.leaves[leaf].dims;
  const std::size_t rank = parts.whole.size();
  LeafPart part{parts.whole, std::vector<std::int64_t>(rank), {}};
  if (rank > dims.size()) return std::nullopt;
  if (rank != 0) {
    if (static_cast<std::size_t>(shard) >= parts.starts.size()) return std::nullopt;
    part.begin = parts.starts[static_cast<std::size_t>(shard)];
  }
  for (std::size_t axis = 0; axis < rank; ++axis)
    part.end.push_back(part.begin[axis] + dims[dims.size() - rank + axis]);
  return part;
}

std::string plain_path(std::string_view path) {
  std::string out;
  while (!path.empty()) {
    if (!out.empty()) out += '/';
    out += take_path_key(path);
  }
  return out;
}

void check_names(const std::string& sink, const Source& source) {
  std::set<std::string> seen;
  for (std::size_t i = 0; i < source.values(); ++i) {
    std::string path = plain_path(source.leaves[i].path);
    if (seen.insert(path).second) continue;
    throw Error(sink + ", tap '" + source.name + "'", "leaves with different names",
                "two leaves '" + path + "'");
  }
}

NamedSources::Named& NamedSources::of(const std::string& sink, const Source& source) {
  if (auto found = known_.find(source.id); found != known_.end()) return found->second;
  check_names(sink, source);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < source.values(); ++i) {
    const std::string& name = names.emplace_back(column_name(source, source.leaves[i]));
    const std::string& owner = owners_.try_emplace(name, source.name).first->second;
    if (owner == source.name) continue;
    throw Error(sink, std::string("'").append(name).append("' of the tap '").append(owner) + "'",
                "that of the tap '" + source.name + "'");
  }
  return known_.try_emplace(source.id, RecordViews(source), std::move(names)).first->second;
}

}  // namespace callgate
