// The files of sinks: owned descriptors whose errors are thrown and name the sink and the path.
//
// Each is used by one thread at a time. Nothing is buffered here: what is written is the system's,
// so a process that dies loses none of it. One process writes to a file at a time, unless all that
// do append to it (Place): see file_lock.h. A pipe or a terminal is not locked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "channel/file_lock.h"
#include "channel/unique_fd.h"

namespace callgate {

enum class FileMode {
  kCreate,  // an existing file is emptied
  kAppend,  // an existing file is kept, a missing one made
};

// How much of some bytes could be written, and why not all: an errno, 0 when all were.
struct Written {
  std::size_t bytes = 0;
  int error = 0;
};

// To an open file: as much as there is room for.
Written write_at(int fd, std::uint64_t offset, std::string_view bytes) noexcept;

class File {
 public:
  // Makes the folders above `path` as well. `sink` is for messages: "JSONL". Throws Error naming
  // the process that writes to the file, where there is one; it is not emptied then. With `appends`
  // writes go to the end, wherever others have moved that.
  File(std::string_view sink, const std::string& path, FileMode mode, Place place, bool appends);
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() = default;

  const std::string& path() const noexcept { return path_; }

  // Keeps others away, as far as the place does, until close(): before anything is written.
  void claim();
  // For whoever shares the place.
  FileLock& lock() noexcept { return *lock_; }

  // False for a pipe or a terminal: it has neither a size nor places.
  bool regular() const noexcept { return regular_; }
  std::uint64_t size() const;
  void truncate(std::uint64_t size);

  // Writes at `offset`, or at the end: as much as there is room for.
  Written write_at(std::uint64_t offset, std::string_view bytes) noexcept {
    return callgate::write_at(fd_.get(), offset, bytes);
  }
  Written append(std::string_view bytes) noexcept;
  // At most `count` bytes from `offset`: fewer at the end of the file.
  std::string read_at(std::uint64_t offset, std::size_t count) const;

  // Throws where the system reports a failure to store what was written. Idempotent.
  void close();

  [[noreturn]] void fail(const char* doing, int error) const;

 private:
  std::string sink_, path_;
  Place place_;
  UniqueFd fd_;
  std::unique_ptr<FileLock> lock_;  // none until it is open
  bool regular_ = false;
};

// A file of lines that grows at its end, line by line, whatever happens: a full disk, another
// process that appends as well, one that was killed in between.
class LineFile {
 public:
  // Whether what a file ends with behind its last newline is a whole line that lacks its newline;
  // else it is a torn one, and cut off.
  using IsWhole = bool (*)(std::string_view tail);

  LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
           IsWhole is_whole);

  void claim() { file_.claim(); }

  // Appends whole lines, each with its newline, in a turn where the place is shared. When not all
  // of them find room, those that do are in the file, none in part; throws Error then, and
  // `written` is how many there are.
  void append(std::string_view lines, std::uint64_t& written);

  // Without its newline; "" in an empty file, and of a pipe or a device.
  std::string first_line() const;

  void close() { file_.close(); }

 private:
  void mend_end();
  std::string tail(std::uint64_t size) const;

  File file_;
  Place place_;
  IsWhole is_whole_;
};

}  // namespace callgate
