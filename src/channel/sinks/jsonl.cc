// See the header.
#include "channel/sinks/jsonl.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <complex>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "channel/consumer.h"
#include "channel/sinks/elements.h"
#include "channel/sinks/names.h"

namespace callgate {
namespace {

constexpr std::size_t kLineBytes = std::size_t{1} << 20;  // larger writes gain nothing

void append_integer(std::string& out, std::string_view key, std::int64_t value) {
  std::array<char, 24> text;
  auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  (out += key).append(text.data(), end);
}

void append_number(std::string& out, bool value) { out += value ? "true" : "false"; }

template <typename T>
  requires(std::is_arithmetic_v<T>)
void append_number(std::string& out, T value) {
  std::array<char, 32> text;  // the longest double takes 24
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) {
      out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
      return;
    }
  }
  auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  std::string_view digits(text.data(), end);
  out += digits;
  if (std::is_floating_point_v<T> && digits.find_first_of(".e") == std::string_view::npos)
    out += ".0";
}

template <typename T>
void append_number(std::string& out, std::complex<T> value) {
  out += '[';
  append_number(out, value.real());
  out += ',';
  append_number(out, value.imag());
  out += ']';
}

// Writes the brackets and commas around elements that come in row-major order.
class Nesting {
 public:
  Nesting(std::string& out, std::span<const std::int64_t> dims)
      : out_(out), dims_(dims), index_(dims.size(), 0) {}

  void before() { out_.append(opening_, '['); }

  void after() {
    opening_ = 0;
    for (std::size_t axis = dims_.size(); axis-- > 0;) {
      if (++index_[axis] < dims_[axis]) {
        out_ += ',';
        return;
      }
      index_[axis] = 0;
      out_ += ']';
      ++opening_;
    }
  }

 private:
  std::string& out_;
  std::span<const std::int64_t> dims_;
  std::vector<std::int64_t> index_;
  std::size_t opening_ = index_.size();  // lists that begin with the next element
};

// An array without elements: [] of shape (0,), [[], []] of shape (2, 0).
void append_empty(std::string& out, std::span<const std::int64_t> dims) {
  out += '[';
  for (std::int64_t i = 0; i < dims.front(); ++i) {
    if (i != 0) out += ',';
    append_empty(out, dims.subspan(1));
  }
  out += ']';
}

// True for one whole JSON object, or nothing but space: what a file of another program may end with
// when that wrote no newline at the end.
bool is_whole(std::string_view line) {
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

// Row-major position `lane` as an index of each level.
void unravel(std::int64_t lane, std::span<const std::int64_t> sizes,
             std::vector<std::int64_t>& index) {
  index.resize(sizes.size());
  for (std::size_t level = sizes.size(); level-- > 0;) {
    index[level] = lane % sizes[level];
    lane /= sizes[level];
  }
}

}  // namespace

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

void append_json_array(std::string& out, const ArrayView& view) {
  if (view.size() == 0) return append_empty(out, view.shape());
  Nesting nesting(out, view.shape());
  each_element(view, [&](auto value) {
    nesting.before();
    append_number(out, value);
    nesting.after();
  });
}

JsonlSink::Layout::Layout(const Source& source)
    : head(R"({"name":)"),
      role(R"(,"role":")" + std::string(role_name(source.role)) + '"'),
      lone(source.values() == 1 && source.leaves.front().path.empty()),
      views(source) {
  check_names("JSONL", source);
  append_json_string(head, source.name);
  for (std::size_t i = 0; i < source.values(); ++i) {
    append_json_string(keys.emplace_back(), plain_path(source.leaves[i].path));
    keys.back() += ':';
  }
}

JsonlSink::JsonlSink(std::string path, FileMode mode)
    : path_(std::move(path)), place_(mode == FileMode::kAppend ? Place::kShared : Place::kAlone) {
  open_file(mode);
}

void JsonlSink::open_file(FileMode mode) {
  file_ = std::make_unique<LineFile>("JSONL", path_, mode, place_, &is_whole);
}

void JsonlSink::open() {
  std::lock_guard lock(mutex_);
  if (file_ == nullptr) open_file(FileMode::kAppend);
  file_->claim();
}

void JsonlSink::consume(std::span<const Record> records) {
  std::lock_guard lock(mutex_);
  auto begin = [&] {
    if (file_ == nullptr) open_file(FileMode::kAppend);
  };
  auto finish = [&] {
    write_out();
    failure_.rethrow();
  };
  consume_each(*this, records, begin, [&](const Record& record) { append_record(record); }, finish);
}

void JsonlSink::append_record(const Record& record) {
  Layout& shared = layouts_.try_emplace(record.source->id, *record.source).first->second;
  visit_lanes(*this, shared.views, record,
              [&](std::int64_t lane, std::span<const ArrayView> leaves) {
                append_whole(lines_, [&] { append_line(record, shared, lane, leaves); });
                if (lines_.size() >= kLineBytes) write_out();
              });
}

void JsonlSink::append_line(const Record& record, Layout& layout, std::int64_t lane,
                            std::span<const ArrayView> leaves) {
  lines_ += layout.head;
  append_integer(lines_, ",\"seq\":", static_cast<std::int64_t>(record.seq));
  append_integer(lines_, ",\"time_ns\":", record.time_ns);
  append_integer(lines_, ",\"device\":", record.device);
  append_integer(lines_, ",\"run\":", record.run);
  lines_ += layout.role;
  if (const Lanes& lanes = record.source->lanes; !lanes.empty()) {
    unravel(lane, lanes.sizes(), layout.lane);
    std::string_view mark = ",\"lane\":[";
    for (std::int64_t index : layout.lane) append_integer(lines_, std::exchange(mark, ","), index);
    lines_ += ']';
  }
  if ((record.flags & kRepeated) != 0) lines_ += ",\"repeated\":true";
  lines_ += layout.lone ? ",\"value\":" : ",\"value\":{";
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (i != 0) lines_ += ',';
    if (!layout.lone) lines_ += layout.keys[i];
    append_json_array(lines_, leaves[i]);
  }
  lines_ += layout.lone ? "}\n" : "}}\n";
}

// What does not find room is lost: written later it would be out of order.
void JsonlSink::write_out() {
  std::uint64_t written = 0;
  if (!lines_.empty() && !failure_.survives([&] { file_->append(lines_, written); })) {
    const auto all = std::count(lines_.begin(), lines_.end(), '\n');
    lose(static_cast<std::uint64_t>(all) - written);
  }
  lines_.clear();
  if (lines_.capacity() > 2 * kLineBytes) lines_.shrink_to_fit();  // after one great record
}

void JsonlSink::close() {
  std::lock_guard lock(mutex_);
  if (file_ == nullptr) return;
  const std::unique_ptr<LineFile> file = std::move(file_);
  file->close();
}

}  // namespace callgate
