// SPDX-License-Identifier: Apache-2.0
// The files of sinks: owned descriptors whose errors are thrown with the sink's name and the path.
//
// Each is used by one thread at a time. Writes are not buffered here: written data belongs to the
// system, so a process that dies loses none of it. Interrupted system calls are repeated. One
// process writes to a file at a time, unless all its writers append (Place).
//
// A sink that writes alone, or several that append whole lines, hold a *place* in the file as long
// as they write. A reader or appender of the file holds a *turn* for moments. Both are locks of
// bytes far behind any content (fcntl's locks of open files,
// https://man7.org/linux/man-pages/man2/fcntl_locking.2.html). File systems without locks, pipes
// and terminals have none. A fork's child shares its parent's open files, and so its locks; only
// the process that took a lock releases it.
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

// A file descriptor with one owner, which closes it.
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
  kAppend,  // an existing file is kept, a missing one created
  kRead,    // the file exists
};

enum class Place : short {
  kAlone,   // the only writer
  kShared,  // others may append, too
};

struct FileUse {
  FileMode mode = FileMode::kCreate;
  Place place = Place::kAlone;
  bool appends = false;       // writes go to the end, also if other processes have moved it
  bool makes_folders = true;  // above the path
};

// The number of bytes written or read, and the errno if not all were; 0 at a file's end.
struct Transfer {
  std::size_t bytes = 0;
  int error = 0;
};

// Repeats the system call some(done) until all is done or it fails. `nothing` is the errno for a
// call without progress.
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
  // `what` is for messages: "the sink JSONL". Throws Error with the process that writes to the
  // file, if there is one; the file is then not emptied.
  File(std::string what, std::string path, FileUse use);
  ~File() { leave(); }

  const std::string& path() const noexcept { return path_; }
  Place place() const noexcept { return place_; }
  // False for a pipe or a terminal, which has neither a size nor places.
  bool regular() const noexcept { return regular_; }

  // Takes the place until close(), before the first write. Throws Error with the other process if
  // one has it, and in a fork's child of the process that created this object.
  void claim();

  // Takes a turn, for std::lock_guard. Throws Error with the holder if the wait takes many seconds.
  void lock();
  void unlock() noexcept {
    if (getpid() == process_) lock_byte(fd_.get(), kTurn, F_UNLCK);
  }

  std::uint64_t size() const;
  // False, with errno, if it failed.
  bool cut(std::uint64_t size) noexcept {
    return ::ftruncate(fd_.get(), static_cast<off_t>(size)) == 0;
  }
  void truncate(std::uint64_t size) {
    if (!cut(size)) fail("shorten", errno);
  }

  // Writes at `offset`, as much as there is room for.
  Transfer write_at(std::uint64_t offset, std::string_view bytes) noexcept;

  // At most `count` bytes from `offset`; fewer at the end of the file.
  std::string read_at(std::uint64_t offset, std::size_t count) const;

  // Throws if the system reports that it could not store the data. Idempotent.
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

  // The locked bytes.
  static constexpr off_t kTurn = off_t{1} << 61, kPlace = kTurn + 1;
  // Turns are short; an endless turn belongs to a suspended process.
  static constexpr auto kLongTurn = std::chrono::seconds(10);
  static constexpr auto kLongPause = std::chrono::microseconds(2000);

  // False if another process has a conflicting lock; true if the file system has no locks.
  static bool lock_byte(int fd, off_t byte, short type) noexcept;

  std::string what_, path_;
  Place place_;
  UniqueFd fd_;
  pid_t process_ = getpid();
  bool regular_ = false, has_place_ = false;
};

// A growing file of units (frames or messages). A unit is in the file as a whole or not at all.
class UnitFile : public File {
 public:
  using File::File;

  // The file grows from here on; an incomplete unit behind this position is cut off.
  void begin_at(std::uint64_t end);

  // Appends pieces of units that end at `ends`, in one system call if possible. On an error, which
  // is thrown, the units with room are in the file, and `written` is their number.
  void append(std::span<iovec> pieces, std::span<const std::size_t> ends, std::size_t& written);

 private:
  static constexpr std::size_t kMostPieces = 1024;  // IOV_MAX of Linux and macOS

  // The pieces without their first bytes.
  static std::span<iovec> without(std::span<iovec> pieces, std::size_t bytes) noexcept;

  bool cut_rest() noexcept;

  std::uint64_t end_ = 0;
  bool torn_ = false;  // bytes of failed units may follow `end_`
};

}  // namespace callgate
