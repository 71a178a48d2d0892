// SPDX-License-Identifier: Apache-2.0
// The files of sinks: owned descriptors whose errors are thrown and name the sink and the path.
//
// Each is used by one thread at a time. Nothing is buffered here: what is written is the system's,
// so a process that dies loses none of it. System calls that a signal interrupts are repeated. One
// process writes to a file at a time, unless all that do append to it (Place).
//
// A sink that writes alone, or several that append whole lines, have a *place* in the file for as
// long as they write; a *turn* is held for moments, by whoever looks at the file or appends to it.
// Both are locks of bytes far behind any content (fcntl's locks of open files,
// https://man7.org/linux/man-pages/man2/fcntl_locking.2.html). Where the file system has no locks,
// and for a pipe or a terminal, there are none. A fork's child shares its parent's open files, and
// with them its locks: a lock is given back by the process that took it, and never by another.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "core/system.h"

namespace callgate {

// A file descriptor that one object owns, and closes.
class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_;
};

enum class FileMode {
  kCreate,  // an existing file is emptied
  kAppend,  // an existing file is kept, a missing one made
  kRead,    // there is one
};

enum class Place : short {
  kAlone,   // nobody else writes
  kShared,  // others may append as well
};

struct FileUse {
  FileMode mode = FileMode::kCreate;
  Place place = Place::kAlone;
  bool appends = false;       // writes go to the end, wherever others have moved that
  bool makes_folders = true;  // above the path
};

// How much of some bytes was written or read, and why not all: an errno, 0 at a file's end.
struct Transfer {
  std::size_t bytes = 0;
  int error = 0;
};

// Repeats some(done), a system call, until all is done or it fails; `nothing`: the errno of none.
template <typename Some>
Transfer transfer_all(std::size_t bytes, int nothing, Some&& some) noexcept {
  Transfer done;
  while (done.bytes < bytes) {
    const ssize_t moved = some(done.bytes);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      done.error = moved < 0 ? errno : nothing;
      break;
    }
    done.bytes += static_cast<std::size_t>(moved);
  }
  return done;
}

class File : Immovable {
 public:
  // `what` is for messages: "the sink JSONL". Throws Error naming the process that writes to the
  // file, where there is one; it is not emptied then.
  File(std::string what, std::string path, FileUse use);
  ~File() { leave(); }

  const std::string& path() const noexcept { return path_; }
  Place place() const noexcept { return place_; }
  // False for a pipe or a terminal: it has neither a size nor places.
  bool regular() const noexcept { return regular_; }

  // Takes the place until close(): before anything is written. Throws Error that names the other
  // process where one has it, and in a fork's child of the process that made this.
  void claim();

  // A turn, for std::lock_guard. Throws Error naming who has it when the wait takes many seconds.
  void lock();
  void unlock() noexcept {
    if (getpid() == process_) lock_byte(fd_.get(), kTurn, F_UNLCK);
  }

  std::uint64_t size() const;
  // False, with errno, where it failed.
  bool cut(std::uint64_t size) noexcept {
    return ::ftruncate(fd_.get(), static_cast<off_t>(size)) == 0;
  }
  void truncate(std::uint64_t size) {
    if (!cut(size)) fail("shorten", errno);
  }

  // Writes at `offset`: as much as there is room for.
  Transfer write_at(std::uint64_t offset, std::string_view bytes) noexcept;

  // At most `count` bytes from `offset`: fewer at the end of the file.
  std::string read_at(std::uint64_t offset, std::size_t count) const;

  // Throws where the system reports a failure to store what was written. Idempotent.
  void close();

  [[noreturn]] void fail(const std::string& doing, int error) const;

 protected:
  int fd() const noexcept { return fd_.get(); }

 private:
  std::string who() const { return what_ + ", '" + path_ + "'"; }

  void check_process() const;

  // In a turn.
  void take_place();
  void leave() noexcept;

  // The bytes that are locked.
  static constexpr off_t kTurn = off_t{1} << 61, kPlace = kTurn + 1;
  // Turns are short; one that does not end is that of a process which has been stopped.
  static constexpr auto kLongTurn = std::chrono::seconds(10);
  static constexpr auto kLongPause = std::chrono::microseconds(2000);

  // False where another has a lock in the way; true where the file system has no locks.
  static bool lock_byte(int fd, off_t byte, short type) noexcept;

  std::string what_, path_;
  Place place_;
  UniqueFd fd_;
  pid_t process_ = getpid();
  bool regular_ = false, has_place_ = false;
};

// A file of units, frames or messages, that grows at its end: a unit is in it whole or not at all.
class UnitFile : public File {
 public:
  using File::File;

  // It grows from here on; what is behind is no whole unit, and is cut off.
  void begin_at(std::uint64_t end);

  // Appends pieces, in one system call where the system takes them, of units that end at `ends`. On
  // an error, which is thrown, those that found room are in the file; `written` is how many.
  void append(std::span<iovec> pieces, std::span<const std::size_t> ends, std::size_t& written);

 private:
  static constexpr std::size_t kMostPieces = 1024;  // IOV_MAX of Linux and macOS

  // The pieces without their first bytes.
  static std::span<iovec> without(std::span<iovec> pieces, std::size_t bytes) noexcept;

  bool cut_rest() noexcept;

  std::uint64_t end_ = 0;
  bool torn_ = false;  // bytes of units that failed may be behind `end_`
};

}  // namespace callgate
