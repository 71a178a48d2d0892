// The files of sinks: owned descriptors whose errors are thrown and name the sink and the path.
//
// Each is used by one thread at a time. Nothing is buffered here: what is written is the system's,
// so a process that dies loses none of it. One process writes to a file at a time, unless all that
// do append to it (Place). A pipe or a terminal is not locked.
//
// A sink that writes alone, or several that append whole lines, have a *place* in the file for as
// long as they write; a *turn* is held for moments, by whoever looks at the file or appends to it.
// Both are locks of bytes far behind any content (fcntl's locks of open files,
// https://man7.org/linux/man-pages/man2/fcntl_locking.2.html), which no other use of the file
// touches. Where the file system has no locks, there are none.
//
// A fork's child shares its parent's open files, and with them its locks: a lock is given back by
// the process that took it, and never by another.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "channel/unique_fd.h"
#include "core/lifetime.h"

namespace callgate {

enum class FileMode {
  kCreate,  // an existing file is emptied
  kAppend,  // an existing file is kept, a missing one made
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

// Repeats some(done), a system call, until all is transferred or it fails; `nothing` is the errno
// of a call that transfers nothing.
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

inline Transfer read_all(int fd, std::uint64_t offset, std::span<char> bytes) noexcept {
  return transfer_all(bytes.size(), /*nothing=*/0, [&](std::size_t done) {
    return ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
  });
}

struct Whole {
  std::size_t count, bytes;
};

// Of units that end at `ends`: how many of them the first `bytes` hold whole, and in how many
// bytes.
inline Whole whole_units(std::span<const std::size_t> ends, std::size_t bytes) noexcept {
  const auto count = static_cast<std::size_t>(std::ranges::upper_bound(ends, bytes) - ends.begin());
  return {count, count == 0 ? 0 : ends[count - 1]};
}

class File : Immovable {
 public:
  // `what` is for messages: "the sink JSONL". Throws Error naming the process that writes to the
  // file, where there is one; it is not emptied then.
  File(std::string what, std::string path, FileUse use);
  ~File() { leave(); }

  const std::string& path() const noexcept { return path_; }
  Place place() const noexcept { return place_; }
  int fd() const noexcept { return fd_.get(); }
  // False for a pipe or a terminal: it has neither a size nor places.
  bool regular() const noexcept { return regular_; }

  // Takes the place, which keeps others away, until close(): before anything is written. Throws
  // Error that names the other process where one has it, and in a fork's child of the process that
  // made this.
  void claim();

  // A turn, for std::lock_guard. Waits for it; throws Error naming who has it when that takes many
  // seconds.
  void lock();
  void unlock() noexcept;

  std::uint64_t size() const {
    struct stat status{};
    if (::fstat(fd_.get(), &status) != 0) fail("read the size of", errno);
    return static_cast<std::uint64_t>(status.st_size);
  }
  // False, with errno, where it failed.
  bool cut(std::uint64_t size) noexcept {
    return ::ftruncate(fd_.get(), static_cast<off_t>(size)) == 0;
  }
  void truncate(std::uint64_t size) {
    if (!cut(size)) fail("shorten", errno);
  }

  // Writes at `offset`, or at the end: as much as there is room for.
  Transfer write_at(std::uint64_t offset, std::string_view bytes) noexcept {
    return transfer_all(bytes.size(), ENOSPC, [&](std::size_t done) {
      return ::pwrite(fd_.get(), bytes.data() + done, bytes.size() - done,
                      static_cast<off_t>(offset + done));
    });
  }
  Transfer append(std::string_view bytes) noexcept {
    return transfer_all(bytes.size(), ENOSPC, [&](std::size_t done) {
      return ::write(fd_.get(), bytes.data() + done, bytes.size() - done);
    });
  }

  // At most `count` bytes from `offset`: fewer at the end of the file.
  std::string read_at(std::uint64_t offset, std::size_t count) const {
    std::string bytes(count, '\0');
    const Transfer done = read_all(fd_.get(), offset, bytes);
    if (done.error != 0) fail("read", done.error);
    bytes.resize(done.bytes);
    return bytes;
  }

  // Throws where the system reports a failure to store what was written. Idempotent.
  void close() {
    if (!fd_) return;
    leave();
    // Not repeated after EINTR: Linux has closed the descriptor by then.
    if (::close(fd_.release()) != 0 && errno != EINTR) fail("close", errno);
  }

  [[noreturn]] void fail(const std::string& doing, int error) const;

 private:
  void check_process() const;
  void take_place();
  void leave() noexcept;  // gives the place back

  std::string what_, path_;
  Place place_;
  UniqueFd fd_;
  pid_t process_ = getpid();
  bool regular_ = false, has_place_ = false;
};

// A file of lines that grows at its end, line by line, whatever happens: a full disk, another
// process that appends as well, one that was killed in between.
class LineFile : public File {
 public:
  // Whether what a file ends with behind its last newline is a whole line that lacks its newline;
  // else it is a torn one, and cut off.
  using IsWhole = bool (*)(std::string_view tail);

  LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
           IsWhole is_whole)
      : File("the sink " + std::string(sink), path, {mode, place, /*appends=*/true}),
        is_whole_(is_whole) {
    if (!regular()) return;
    const std::lock_guard turn(*this);
    mend_end();
  }

  // Appends whole lines, each with its newline, in a turn where the place is shared. When not all
  // of them find room, those that do are in the file, none in part; throws Error then, and
  // `written` is how many there are.
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
    const Transfer done = File::append(lines);
    std::string_view whole = lines.substr(0, done.bytes);
    whole = whole.substr(0, whole.rfind('\n') + 1);  // npos + 1 is 0
    written = static_cast<std::uint64_t>(std::ranges::count(whole, '\n'));
    if (done.error == 0) return;
    // What is left of a line would stand before the next: where it can't be cut off now, the next
    // turn does.
    if (regular() && whole.size() != done.bytes) cut(start + whole.size());
    fail("write to", done.error);
  }

  // Without its newline; "" in an empty file, and of a pipe or a device.
  std::string first_line() const {
    std::string line;
    if (!regular()) return line;  // a device may have no end
    for (std::uint64_t at = 0;; at += kReadBytes) {
      const std::string bytes = read_at(at, kReadBytes);
      const std::size_t newline = bytes.find('\n');
      line += bytes.substr(0, newline);
      if (newline != std::string::npos || bytes.size() < kReadBytes) return line;
    }
  }

 private:
  static constexpr std::size_t kReadBytes = std::size_t{1} << 16;

  // Makes the file end with a whole line.
  void mend_end() {
    const std::uint64_t end = size();
    if (end == 0 || read_at(end - 1, 1) == "\n") return;
    std::string torn;  // what follows the last newline
    for (std::uint64_t start = end; start > 0;) {
      const std::uint64_t count = std::min<std::uint64_t>(start, kReadBytes);
      start -= count;
      const std::string bytes = read_at(start, count);
      const std::size_t newline = bytes.rfind('\n');
      torn.insert(0, bytes, newline + 1);  // npos + 1 is 0
      if (newline != std::string::npos) break;
    }
    if (!is_whole_(torn)) return truncate(end - torn.size());
    if (const Transfer done = File::append("\n"); done.error != 0) fail("write to", done.error);
  }

  IsWhole is_whole_;
};

}  // namespace callgate
