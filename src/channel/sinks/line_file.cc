// See the header.
#include "channel/sinks/line_file.h"

#include <algorithm>
#include <cstddef>

namespace callgate {
namespace {

constexpr std::size_t kReadBytes = std::size_t{1} << 16;

std::uint64_t lines_in(std::string_view text) {
  return static_cast<std::uint64_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace

LineFile::LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
                   IsWhole is_whole)
    : file_(sink, path, mode, place, /*appends=*/true), place_(place), is_whole_(is_whole) {
  if (!file_.regular()) return;
  Turn turn(file_.lock());
  mend_end();
}

void LineFile::append(std::string_view lines, std::uint64_t& written) {
  written = 0;
  file_.claim();
  if (file_.regular() && place_ == Place::kShared) {
    Turn turn(file_.lock());
    append_in_turn(lines, written);
  } else {
    append_in_turn(lines, written);
  }
}

void LineFile::append_in_turn(std::string_view lines, std::uint64_t& written) {
  std::uint64_t start = 0;
  if (file_.regular()) {
    mend_end();  // another process may have been killed in its turn
    start = file_.size();
  }
  const Written done = file_.append(lines);
  std::string_view whole = lines.substr(0, done.bytes);
  whole = whole.substr(0, whole.rfind('\n') + 1);  // npos + 1 is 0
  written = lines_in(whole);
  if (done.error == 0) return;
  // What is left of a line would stand before the next: where it can't be cut off now, the next
  // turn does.
  if (file_.regular() && whole.size() != done.bytes) {
    try {
      file_.truncate(start + whole.size());
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first error counts
    }
  }
  file_.fail("write to", done.error);
}

std::string LineFile::first_line() const {
  std::string line;
  if (!file_.regular()) return line;  // a device may have no end
  for (std::uint64_t at = 0;; at += kReadBytes) {
    const std::string bytes = file_.read_at(at, kReadBytes);
    const std::size_t newline = bytes.find('\n');
    line += bytes.substr(0, newline);
    if (newline != std::string::npos || bytes.size() < kReadBytes) return line;
  }
}

// What follows the last newline.
std::string LineFile::tail(std::uint64_t size) const {
  std::string tail;
  for (std::uint64_t start = size; start > 0;) {
    const std::uint64_t count = std::min<std::uint64_t>(start, kReadBytes);
    start -= count;
    std::string bytes = file_.read_at(start, count);
    const std::size_t newline = bytes.rfind('\n');
    tail.insert(0, newline == std::string::npos ? bytes : bytes.substr(newline + 1));
    if (newline != std::string::npos) break;
  }
  return tail;
}

// Makes the file end with a whole line.
void LineFile::mend_end() {
  const std::uint64_t size = file_.size();
  if (size == 0 || file_.read_at(size - 1, 1) == "\n") return;
  const std::string torn = tail(size);
  if (!is_whole_(torn)) {
    file_.truncate(size - torn.size());
  } else if (const Written done = file_.append("\n"); done.error != 0) {
    file_.fail("write to", done.error);
  }
}

}  // namespace callgate
