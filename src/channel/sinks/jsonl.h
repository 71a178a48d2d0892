// SPDX-License-Identifier: Apache-2.0
// The sink JSONL: a line of JSON for each lane of each record. https://jsonlines.org
//
//   {"name":"loss","seq":3,"time_ns":1700000000000000000,"device":0,"run":7,"role":"primal",
//    "lane":[2],"repeated":true,"value":0.25}                       (on one line in the file)
//
// Lines of a program over several devices also have "process", the whole arrays' "global_shape" and
// the "shard", [begin, end) of each dimension, in the form of the value.
// "lane" exists for taps under vmap, with one index per batch level, outermost first. "repeated"
// exists if the tap ran before in the same execution. "value" is a number or nested lists for a
// lone leaf, otherwise an object from each leaf's path ("w/0") to these.
// Floats have the fewest digits that restore the same value (of float32 for smaller types), and
// always a point or an exponent, so they stay floats. JSON has no infinities: infinities and NaN
// are the strings "NaN", "Infinity" and "-Infinity", which Python's float() accepts. A complex
// number is [real, imaginary]. https://www.rfc-editor.org/rfc/rfc8259
// Every batch of records reaches the system as whole lines, so a killed process leaves a readable
// file. If the disk has room for a part of a batch, the file has the lines of that part.
#pragma once

#include <unistd.h>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
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

// True for one whole JSON object, or only spaces.
bool is_whole_json(std::string_view line);

// A number for rank 0, otherwise lists nested to the array's rank.
void append_json_array(std::string& out, const ArrayView& view);

// A growing file of lines. It keeps whole lines in all cases: a full disk, another appending
// process, or one that was killed in between.
class LineFile : public File {
 public:
  // True if the text behind a file's last newline only lacks the newline; otherwise it is torn and
  // cut off.
  using IsWhole = bool (*)(std::string_view tail);

  LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
           IsWhole is_whole);

  // Appends whole lines, in a turn if the place is shared. If not all have room, the file has those
  // that do, none in part; then throws Error, and `written` is their number.
  void append(std::string_view lines, std::uint64_t& written);

  // Without its newline; "" for an empty file, a pipe or a device.
  std::string first_line() const;

 private:
  static constexpr std::size_t kReadBytes = std::size_t{1} << 16;

  Transfer add(std::string_view bytes) noexcept;

  // Makes the file end with a whole line.
  void mend_end();

  IsWhole is_whole_;
};

class JsonlSink final : public Sink {
 public:
  // Opens the file; throws for a path that can't be written. With kAppend, lines are added to an
  // existing file, to which other processes may append, too, and an incomplete last line is cut
  // off. After close(), further records open the file again. `process` is the index of this process
  // in its program.
  JsonlSink(std::string path, FileMode mode, std::int64_t process = 0);

  void open() override;

  void close() override;

  std::string description() const override { return "JSONL('" + path_ + "')"; }

 private:
  // The common part of the lines of one source.
  struct Layout {
    explicit Layout(const Source& source);
    std::string head = R"({"name":)";  // {"name":"loss"
    std::vector<std::string> keys;     // per value leaf, with the quotes: "w/0":
    bool lone;                         // the value is a single leaf
    RecordViews views;
  };

  void open_file(FileMode mode) {
    file_ = std::make_unique<LineFile>("JSONL", path_, mode, place_, &is_whole_json);
  }

  void begin() override {
    if (file_ == nullptr) open_file(FileMode::kAppend);
  }

  void take(const Record& record) override;

  void append_line(const Record& record, const Layout& layout, std::int64_t lane,
                   std::span<const ArrayView> leaves);

  // A member of the line with an entry for each leaf.
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

  // The process, and each leaf's part of the whole array: [begin, end) of a dimension.
  void append_parts(const Record& record, const Layout& layout);

  template <typename Append>
  void append_list(std::size_t count, Append&& append) {
    lines_ += '[';
    for (std::size_t i = 0; i < count; ++i) {
      if (i != 0) lines_ += ',';
      append(i);
    }
    lines_ += ']';
  }

  void append_lane(const Lanes& lanes, std::int64_t lane);

  // A line without room is lost, because a later write would be out of order.
  void write() override;

  std::string path_;
  const Place place_;
  const std::int64_t process_;
  std::unique_ptr<LineFile> file_;                     // null while closed
  std::unordered_map<std::uint64_t, Layout> layouts_;  // by Source::id
  std::string lines_;                                  // not yet in the file
};

}  // namespace callgate
