// SPDX-License-Identifier: Apache-2.0
// The sink JSONL: a line of JSON for each lane of each record. https://jsonlines.org
//
//   {"name":"loss","seq":3,"time_ns":1700000000000000000,"device":0,"run":7,"role":"primal",
//    "lane":[2],"repeated":true,"value":0.25}                       (on one line in the file)
//
// Lines of a program over several devices have "process", the whole arrays' "global_shape" and the
// "shard", [begin, end) of each dimension, in the form of the value.
// "lane" is there for taps that vmap met, one index a batch level, outermost first; "repeated"
// where the tap ran before in the same execution. "value" is a number or nested lists for a lone
// leaf, else an object from each leaf's path ("w/0") to these.
// Floats have the fewest digits that give back the same value (of float32 for smaller types), and
// always a point or an exponent, so that they stay floats. JSON has no infinities: they and NaN are
// the strings "NaN", "Infinity" and "-Infinity", which Python's float() takes. A complex number is
// [real, imaginary]. https://www.rfc-editor.org/rfc/rfc8259
// Whole lines reach the system with every batch of records, so a process that dies leaves a file
// that can be read, and one that finds no room for all of a batch the lines that found some.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "channel/sinks/leaves.h"

namespace callgate {

template <typename T>
void append_json_number(std::string& out, T value) {
  if constexpr (std::is_same_v<T, bool>) {
    out += value ? "true" : "false";
  } else if constexpr (requires { value.imag(); }) {
    append_json_number(out += '[', value.real());
    append_json_number(out += ',', value.imag());
    out += ']';
  } else {
    if (std::is_floating_point_v<T> && !std::isfinite(value)) {
      out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
      return;
    }
    char text[32];  // the longest double takes 24
    const std::string_view digits(text, std::to_chars(text, text + sizeof(text), value).ptr);
    out += digits;
    if (std::is_floating_point_v<T> && digits.find_first_of(".e") == std::string_view::npos)
      out += ".0";
  }
}

// An array without elements: [] of shape (0,), [[], []] of shape (2, 0).
inline void append_json_empty(std::string& out, std::span<const std::int64_t> dims) {
  out += '[';
  for (std::int64_t i = 0; i < dims.front(); ++i) {
    if (i != 0) out += ',';
    append_json_empty(out, dims.subspan(1));
  }
  out += ']';
}

// True for one whole JSON object, or nothing but space.
inline bool is_whole_json(std::string_view line) {
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

// `text`, UTF-8, as a JSON string with its quotes.
inline void append_json_string(std::string& out, std::string_view text) {
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

// A number for rank 0, else lists nested to the array's rank.
inline void append_json_array(std::string& out, const ArrayView& view) {
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

// A file of lines that grows at its end, line by line, whatever happens: a full disk, another
// process that appends as well, one that was killed in between.
class LineFile : public File {
 public:
  // True if what a file has behind its last newline lacks but that; else it is torn, and cut off.
  using IsWhole = bool (*)(std::string_view tail);

  LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
           IsWhole is_whole)
      : File("the sink " + std::string(sink), path, {mode, place, /*appends=*/true}),
        is_whole_(is_whole) {
    if (!regular()) return;
    const std::lock_guard turn(*this);
    mend_end();
  }

  // Appends whole lines, in a turn where the place is shared. When not all find room, those that do
  // are in the file, none in part; throws Error then, and `written` is how many there are.
  void append(std::string_view lines, std::uint64_t& written) {
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
    // A line's rest would stand before the next: where it can't be cut off now, the next turn does.
    if (regular() && whole.size() != done.bytes) cut(start + whole.size());
    fail("write to", done.error);
  }

  // Without its newline; "" in an empty file, and of a pipe or a device.
  std::string first_line() const {
    if (!regular()) return "";  // a device may have no end
    for (std::size_t count = kReadBytes;; count *= 2) {
      const std::string start = read_at(0, count);
      const std::size_t newline = start.find('\n');
      if (newline != std::string::npos || start.size() < count) return start.substr(0, newline);
    }
  }

 private:
  static constexpr std::size_t kReadBytes = std::size_t{1} << 16;

  Transfer add(std::string_view bytes) noexcept {
    return transfer_all(bytes.size(), ENOSPC, [&](std::size_t done) {
      return ::write(fd(), bytes.data() + done, bytes.size() - done);
    });
  }

  // Makes the file end with a whole line.
  void mend_end() {
    const std::uint64_t end = size();
    if (end == 0 || read_at(end - 1, 1) == "\n") return;
    std::string torn;  // what follows the last newline
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

  IsWhole is_whole_;
};

class JsonlSink final : public Sink {
 public:
  // Opens the file: a path that cannot be written is an error here. With kAppend, lines are added
  // to a file that exists, to which other processes may append as well, and a last line that a
  // crash left unfinished is cut off. After close(), further records open the file again.
  // `process` is the index of this one among those of its program.
  JsonlSink(std::string path, FileMode mode, std::int64_t process = 0)
      : path_(std::move(path)),
        place_(mode == FileMode::kAppend ? Place::kShared : Place::kAlone),
        process_(process) {
    open_file(mode);
  }

  void open() override {
    std::lock_guard lock(mutex_);
    if (file_ == nullptr) open_file(FileMode::kAppend);
    file_->claim();
  }

  void close() override {
    std::lock_guard lock(mutex_);
    if (const std::unique_ptr<LineFile> file = std::move(file_)) file->close();
  }

  std::string description() const override { return "JSONL('" + path_ + "')"; }

 private:
  // What the lines of one source share.
  struct Layout {
    explicit Layout(const Source& source)
        : lone(source.values() == 1 && source.leaves.front().path.empty()), views(source) {
      check_names("the sink JSONL", source);
      append_json_string(head, source.name);
      for (std::size_t i = 0; i < source.values(); ++i) {
        append_json_string(keys.emplace_back(), plain_path(source.leaves[i].path));
        keys.back() += ':';
      }
    }
    std::string head = R"({"name":)";  // {"name":"loss"
    std::vector<std::string> keys;     // of each value leaf, with the quotes: "w/0":
    bool lone;                         // the value is the one leaf itself
    RecordViews views;
  };

  void open_file(FileMode mode) {
    file_ = std::make_unique<LineFile>("JSONL", path_, mode, place_, &is_whole_json);
  }

  void begin() override {
    if (file_ == nullptr) open_file(FileMode::kAppend);
  }

  void take(const Record& record) override {
    Layout& layout = layouts_.try_emplace(record.source->id, *record.source).first->second;
    visit_lanes(layout.views, record, [&](std::int64_t lane, std::span<const ArrayView> leaves) {
      append_whole(lines_, [&] { append_line(record, layout, lane, leaves); });
      if (lines_.size() >= kManyBytes) write_now();
    });
  }

  void append_line(const Record& record, const Layout& layout, std::int64_t lane,
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

  // A member of the line with something for each leaf.
  template <typename Append>
  void append_leaves(std::string_view name, const Layout& layout, Append&& append) {
    (((lines_ += ",\"") += name) += "\":") += layout.lone ? "" : "{";
    for (std::size_t i = 0; i < layout.keys.size(); ++i) {
      if (i != 0) lines_ += ',';
      if (!layout.lone) lines_ += layout.keys[i];
      append(i);
    }
    if (!layout.lone) lines_ += '}';
  }

  // Of which process, and which part of the whole array each leaf is: [begin, end) of a dimension.
  void append_parts(const Record& record, const Layout& layout) {
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

  template <typename Append>
  void append_list(std::size_t count, Append&& append) {
    lines_ += '[';
    for (std::size_t i = 0; i < count; ++i) {
      if (i != 0) lines_ += ',';
      append(i);
    }
    lines_ += ']';
  }

  void append_lane(const Lanes& lanes, std::int64_t lane) {
    lines_ += ",\"lane\":";
    char mark = '[';
    lanes.each_index(lane, [&](std::int64_t index) {
      append_json_number(lines_ += std::exchange(mark, ','), index);
    });
    lines_ += ']';
  }

  // What does not find room is lost: written later it would be out of order.
  void write() override {
    if (lines_.empty()) return;
    std::uint64_t written = 0;
    FirstError error;
    if (!error.survives([&] { file_->append(lines_, written); }))
      lose(static_cast<std::uint64_t>(std::ranges::count(lines_, '\n')) - written);
    lines_.clear();
    if (lines_.capacity() > 2 * kManyBytes) lines_.shrink_to_fit();  // after one great record
    error.rethrow();
  }

  std::string path_;
  const Place place_;
  const std::int64_t process_;
  std::unique_ptr<LineFile> file_;                     // none while closed
  std::unordered_map<std::uint64_t, Layout> layouts_;  // by Source::id
  std::string lines_;                                  // not yet in the file
};

}  // namespace callgate
