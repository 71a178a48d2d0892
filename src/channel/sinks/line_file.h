// A file of lines that grows at its end, line by line, whatever happens: a full disk, another
// process that appends as well, one that was killed in between.
//
// Used by one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "channel/sinks/file.h"

namespace callgate {

class LineFile {
 public:
  // Whether what a file ends with behind its last newline is a whole line that lacks its newline;
  // else it is a torn one, and cut off.
  using IsWhole = bool (*)(std::string_view tail);

  LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
           IsWhole is_whole);

  void claim() { file_.claim(); }

  // Appends whole lines, each with its newline. When not all of them find room, those that do are
  // in the file, none in part; throws Error then, and `written` is how many there are.
  void append(std::string_view lines, std::uint64_t& written);

  // Without its newline; "" in an empty file, and of a pipe or a device.
  std::string first_line() const;

  void close() { file_.close(); }

 private:
  void append_in_turn(std::string_view lines, std::uint64_t& written);
  void mend_end();
  std::string tail(std::uint64_t size) const;

  File file_;
  Place place_;
  IsWhole is_whole_;
};

}  // namespace callgate
