// SPDX-License-Identifier: Apache-2.0
// Records as lines of JSON.
#include "channel/sinks/jsonl.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <utility>

namespace callgate {
namespace {

// An array without elements: [] for shape (0,), [[], []] for shape (2, 0).
void append_json_empty(std::string& out, std::span<const std::int64_t> dims) {
  out += '[';
  for (std::int64_t i = 0; i < dims.front(); ++i) {
    if (i != 0) out += ',';
    append_json_empty(out, dims.subspan(1));
  }
  out += ']';
}

// `text`, in UTF-8, as a JSON string with quotes.
void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (char c : text) {
    auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (code < 0x20) {
      ((out += "\\u00") += kHex[code >> 4]) += kHex[code & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

}  // namespace

bool is_whole_json(std::string_view line) {
  std::int64_t depth = 0;
  bool quoted = false, escaped = false;
  for (char c : line) {
    if (quoted) {
      if (!std::exchange(escaped, false)) {
        escaped = c == '\\';
        quoted = c != '"';
      }
      continue;
    }
    quoted = c == '"';
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
  }
  std::size_t last = line.find_last_not_of(" \t\r");
  return !quoted && depth == 0 && (last == std::string_view::npos || line[last] == '}');
}

void append_json_array(std::string& out, const ArrayView& view) {
  const std::span dims = view.shape();
  if (view.size() == 0) return append_json_empty(out, dims);
  std::vector<std::int64_t> index(dims.size(), 0);
  std::size_t opening = dims.size();  // lists that begin with the next element
  each_element(view, [&](auto value) {
    out.append(std::exchange(opening, 0), '[');
    append_json_number(out, value);
    for (std::size_t axis = dims.size(); axis-- > 0;) {
      if (++index[axis] < dims[axis]) {
        out += ',';
        return;
      }
      index[axis] = 0;
      out += ']';
      ++opening;
    }
  });
}

LineFile::LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
                   IsWhole is_whole)
    : File("the sink " + std::string(sink), path, {mode, place, /*appends=*/true}),
      is_whole_(is_whole) {
  if (!regular()) return;
  const std::lock_guard turn(*this);
  mend_end();
}

void LineFile::append(std::string_view lines, std::uint64_t& written) {
  written = 0;
  claim();
  std::unique_lock<File> turn(*this, std::defer_lock);
  std::uint64_t start = 0;
  if (regular()) {
    if (place() == Place::kShared) turn.lock();
    mend_end();  // another process may have been killed in its turn
    start = size();
  }
  const Transfer done = add(lines);
  std::string_view whole = lines.substr(0, done.bytes);
  whole = whole.substr(0, whole.rfind('\n') + 1);  // npos + 1 is 0
  written = static_cast<std::uint64_t>(std::ranges::count(whole, '\n'));
  if (done.error == 0) return;
  // The rest of a line would precede the next one. If it can't be cut off now, the next turn does.
  if (regular() && whole.size() != done.bytes) cut(start + whole.size());
  fail("write to", done.error);
}

std::string LineFile::first_line() const {
  if (!regular()) return "";  // a device may have no end
  for (std::size_t count = kReadBytes;; count *= 2) {
    const std::string start = read_at(0, count);
    const std::size_t newline = start.find('\n');
    if (newline != std::string::npos || start.size() < count) return start.substr(0, newline);
  }
}

Transfer LineFile::add(std::string_view bytes) noexcept {
  return transfer_all(bytes.size(), ENOSPC, [&](std::size_t done) {
    return ::write(fd(), bytes.data() + done, bytes.size() - done);
  });
}

void LineFile::mend_end() {
  const std::uint64_t end = size();
  if (end == 0 || read_at(end - 1, 1) == "\n") return;
  std::string torn;  // the text behind the last newline
  for (std::uint64_t count = kReadBytes;; count *= 2) {
    const std::uint64_t start = end - std::min(count, end);
    torn = read_at(start, end - start);
    const std::size_t newline = torn.rfind('\n');
    torn.erase(0, newline + 1);  // npos + 1 is 0
    if (newline != std::string::npos || start == 0) break;
  }
  if (!is_whole_(torn)) return truncate(end - torn.size());
  if (const Transfer done = add("\n"); done.error != 0) fail("write to", done.error);
}

JsonlSink::JsonlSink(std::string path, FileMode mode, std::int64_t process)
    : path_(std::move(path)),
      place_(mode == FileMode::kAppend ? Place::kShared : Place::kAlone),
      process_(process) {
  open_file(mode);
}

void JsonlSink::open() {
  std::lock_guard lock(mutex_);
  if (file_ == nullptr) open_file(FileMode::kAppend);
  file_->claim();
}

void JsonlSink::close() {
  std::lock_guard lock(mutex_);
  if (const std::unique_ptr<LineFile> file = std::move(file_)) file->close();
}

JsonlSink::Layout::Layout(const Source& source)
    : lone(source.values() == 1 && source.leaves.front().path.empty()), views(source) {
  check_names("the sink JSONL", source);
  append_json_string(head, source.name);
  for (std::size_t i = 0; i < source.values(); ++i) {
    append_json_string(keys.emplace_back(), plain_path(source.leaves[i].path));
    keys.back() += ':';
  }
}

void JsonlSink::take(const Record& record) {
  Layout& layout = layouts_.try_emplace(record.source->id, *record.source).first->second;
  visit_lanes(layout.views, record, [&](std::int64_t lane, std::span<const ArrayView> leaves) {
    append_whole(lines_, [&] { append_line(record, layout, lane, leaves); });
    if (lines_.size() >= kManyBytes) write_now();
  });
}

void JsonlSink::append_line(const Record& record, const Layout& layout, std::int64_t lane,
                            std::span<const ArrayView> leaves) {
  lines_ += layout.head;
  append_json_number(lines_ += ",\"seq\":", record.seq);
  append_json_number(lines_ += ",\"time_ns\":", record.time_ns);
  append_json_number(lines_ += ",\"device\":", record.device);
  append_json_number(lines_ += ",\"run\":", record.run);
  ((lines_ += R"(,"role":")") += role_name(record.source->role)) += '"';
  if (const Lanes& lanes = record.source->lanes; !lanes.empty()) append_lane(lanes, lane);
  if ((record.flags & kRepeated) != 0) lines_ += ",\"repeated\":true";
  if (record.shard() >= 0 && !record.source->parts.empty()) append_parts(record, layout);
  append_leaves("value", layout, [&](std::size_t i) { append_json_array(lines_, leaves[i]); });
  lines_ += "}\n";
}

void JsonlSink::append_parts(const Record& record, const Layout& layout) {
  append_json_number(lines_ += ",\"process\":", process_);
  append_leaves("global_shape", layout, [&](std::size_t i) {
    const std::optional<LeafPart> part = part_of(record, i);
    append_list(part ? part->whole.size() : 0,
                [&](std::size_t axis) { append_json_number(lines_, part->whole[axis]); });
  });
  append_leaves("shard", layout, [&](std::size_t i) {
    const std::optional<LeafPart> part = part_of(record, i);
    append_list(part ? part->whole.size() : 0, [&](std::size_t axis) {
      append_json_number(lines_ += '[', part->begin[axis]);
      append_json_number(lines_ += ',', part->end[axis]);
      lines_ += ']';
    });
  });
}

void JsonlSink::append_lane(const Lanes& lanes, std::int64_t lane) {
  lines_ += ",\"lane\":";
  char mark = '[';
  lanes.each_index(lane, [&](std::int64_t index) {
    append_json_number(lines_ += std::exchange(mark, ','), index);
  });
  lines_ += ']';
}

void JsonlSink::write() {
  if (lines_.empty()) return;
  std::uint64_t written = 0;
  FirstError error;
  if (!error.survives([&] { file_->append(lines_, written); }))
    lose(static_cast<std::uint64_t>(std::ranges::count(lines_, '\n')) - written);
  lines_.clear();
  if (lines_.capacity() > 2 * kManyBytes) lines_.shrink_to_fit();  // after a very large record
  error.rethrow();
}

}  // namespace callgate
