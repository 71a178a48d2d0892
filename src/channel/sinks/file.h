// The files of sinks: owned descriptors whose errors are thrown and name the sink and the path.
//
// Each is used by one thread at a time. Nothing is buffered here: what is written is the system's,
// so a process that dies loses none of it. One process writes to a file at a time, unless all that
// do append to it (Place): see FileLock. A pipe or a terminal is not locked.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "channel/unique_fd.h"

namespace callgate {

// Locks between the processes that write to one file.
//
// A sink that writes alone, or several that append whole lines, have a *place* in the file for as
// long as they write; a *turn* is held for moments, by whoever looks at the file or appends to it.
// Both are locks of bytes far behind any content (fcntl's locks of open files,
// https://man7.org/linux/man-pages/man2/fcntl_locking.2.html), which no other use of the file
// touches. Where the file system has no locks, there are none.
//
// A fork's child shares its parent's open files, and with them its locks: a lock is given back by
// the process that took it, and never by another.
enum class Place : short {
  kAlone,   // nobody else writes
  kShared,  // others may append as well
};

class FileLock {
 public:
  // For an open descriptor, which outlives this. `what` is for messages: "the sink JSONL, 'a.txt'".
  FileLock(int fd, std::string what);
  ~FileLock() { leave(); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // A turn, for std::lock_guard. Waits for it; throws Error naming who has it when that takes many
  // seconds.
  void lock();
  void unlock() noexcept;

  // In a turn. Throws Error that names the other process where one has the place.
  void take_place(Place place);
  bool has_place() const noexcept { return has_place_; }

  // Gives everything back. Idempotent.
  void leave() noexcept;

  // Throws Error in a fork's child of the process that made this.
  void check_process() const;

 private:
  int fd_;
  std::string what_;
  pid_t process_ = getpid();
  bool has_place_ = false;
};

// Takes the whole file for one writer, which unlocks it by flock(fd, LOCK_UN). False, with errno,
// where the system has no such locks; throws Error that names the other writer where there is one.
bool lock_alone(int fd, const std::string& what);

// Who has the file locked, for messages: "process 1234 ('train.py')", or "another process" where
// the system does not tell.
std::string lock_holders(int fd);

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
