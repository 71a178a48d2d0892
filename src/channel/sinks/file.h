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

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
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
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
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
  File(std::string what, std::string path, FileUse use)
      : what_(std::move(what)), path_(std::move(path)), place_(use.place) {
    const bool reads = use.mode == FileMode::kRead;
    std::error_code ignored;  // open() reports a folder that could not be made
    if (use.makes_folders && !reads)
      std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
    const int flags = reads ? O_RDONLY : O_RDWR | O_CREAT | (use.appends ? O_APPEND : 0);
    do {
      fd_ = UniqueFd(::open(path_.c_str(), flags | O_CLOEXEC, 0666));
    } while (!fd_ && errno == EINTR);
    if (!fd_) fail("open", errno);
    struct stat status{};
    regular_ = ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
    if (!regular_ || reads) return;
    const std::lock_guard turn(*this);
    take_place();
    if (use.mode == FileMode::kCreate) truncate(0);
    leave();  // an idle sink is in nobody's way
  }
  ~File() { leave(); }

  const std::string& path() const noexcept { return path_; }
  Place place() const noexcept { return place_; }
  // False for a pipe or a terminal: it has neither a size nor places.
  bool regular() const noexcept { return regular_; }

  // Takes the place until close(): before anything is written. Throws Error that names the other
  // process where one has it, and in a fork's child of the process that made this.
  void claim() {
    check_process();
    if (!regular_ || has_place_) return;
    const std::lock_guard turn(*this);
    take_place();
  }

  // A turn, for std::lock_guard. Throws Error naming who has it when the wait takes many seconds.
  void lock() {
    check_process();
    const auto end = std::chrono::steady_clock::now() + kLongTurn;
    for (std::chrono::microseconds pause(20);; pause = std::min(2 * pause, kLongPause)) {
      if (lock_byte(fd_.get(), kTurn, F_WRLCK)) return;
      if (std::chrono::steady_clock::now() > end)
        throw Error(ErrorCode::kDeadlineExceeded,
                    who() + ": nothing can be written, since for 10 s it has been locked by " +
                        lock_holders(fd_.get()));
      std::this_thread::sleep_for(pause);
    }
  }
  void unlock() noexcept {
    if (getpid() == process_) lock_byte(fd_.get(), kTurn, F_UNLCK);
  }

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

  // Writes at `offset`: as much as there is room for.
  Transfer write_at(std::uint64_t offset, std::string_view bytes) noexcept {
    return transfer_all(bytes.size(), ENOSPC, [&](std::size_t done) {
      return ::pwrite(fd_.get(), bytes.data() + done, bytes.size() - done,
                      static_cast<off_t>(offset + done));
    });
  }

  // At most `count` bytes from `offset`: fewer at the end of the file.
  std::string read_at(std::uint64_t offset, std::size_t count) const {
    std::string bytes(count, '\0');
    const Transfer done = transfer_all(count, /*nothing=*/0, [&](std::size_t so_far) {
      return ::pread(fd_.get(), bytes.data() + so_far, count - so_far,
                     static_cast<off_t>(offset + so_far));
    });
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

  [[noreturn]] void fail(const std::string& doing, int error) const {
    throw Error(
        error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInternal,
        what_ + " cannot " + doing + " '" + path_ + "': " + std::generic_category().message(error));
  }

 protected:
  int fd() const noexcept { return fd_.get(); }

 private:
  std::string who() const { return what_ + ", '" + path_ + "'"; }

  void check_process() const {
    if (getpid() == process_) return;
    throw Error(ErrorCode::kAborted, who() + ": expected to be used by the process that made it, " +
                                         std::to_string(process_) + ", got a fork of that, " +
                                         std::to_string(getpid()) +
                                         "; make a sink of its own there");
  }

  // In a turn.
  void take_place() {
    const bool alone = place_ == Place::kAlone;
    if (!lock_byte(fd_.get(), kPlace, alone ? F_WRLCK : F_RDLCK))
      throw Error(
          ErrorCode::kAlreadyExists, who(),
          alone ? "a file that nobody else writes to" : "a file that others append to, if at all",
          "one that has another writer, " + lock_holders(fd_.get()));
    has_place_ = true;
  }
  void leave() noexcept {
    if (std::exchange(has_place_, false) && getpid() == process_)
      lock_byte(fd_.get(), kPlace, F_UNLCK);
  }

  // The bytes that are locked.
  static constexpr off_t kTurn = off_t{1} << 61, kPlace = kTurn + 1;
  // Turns are short; one that does not end is that of a process which has been stopped.
  static constexpr auto kLongTurn = std::chrono::seconds(10);
  static constexpr auto kLongPause = std::chrono::microseconds(2000);

  // False where another has a lock in the way; true where the file system has no locks.
  static bool lock_byte(int fd, off_t byte, short type) noexcept {
    struct flock lock{};  // its members have another order on each system
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    while (fcntl(fd, kSetFileLock, &lock) != 0)
      if (errno != EINTR) return errno != EAGAIN && errno != EACCES;
    return true;
  }

  // The names in a folder that are numbers.
  static std::vector<std::string> numbers_in(const std::string& folder) {
    std::vector<std::string> names;
    std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), &closedir);
    if (open == nullptr) return names;
    while (const dirent* entry = readdir(open.get()))
      if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') names.emplace_back(entry->d_name);
    return names;
  }

  static std::string contents_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // True if a process has the file open and locked.
  static bool has_locked(const std::string& process, const struct stat& file) {
    const std::string folder = "/proc/" + process + "/fd";
    return std::ranges::any_of(numbers_in(folder), [&](const std::string& fd) {
      struct stat open{};
      return stat((folder + '/' + fd).c_str(), &open) == 0 && open.st_dev == file.st_dev &&
             open.st_ino == file.st_ino &&
             contents_of(folder + "info/" + fd).find("lock:") != std::string::npos;
    });
  }

  // What a process was started as, shortened.
  static std::string program_of(const std::string& process) {
    std::string words = contents_of("/proc/" + process + "/cmdline");
    std::ranges::replace(words, '\0', ' ');
    std::erase_if(words, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
    while (words.ends_with(' ')) words.pop_back();
    if (words.size() > 80) words = words.substr(0, 77) + "...";
    return words;
  }

  // Who has the file locked: "process 1234 ('train.py')", or "another process" where the system
  // does not tell.
  static std::string lock_holders(int fd) {
    struct stat file{};
    std::string found;
    if (fstat(fd, &file) == 0) {
      const std::string own = std::to_string(getpid());
      for (const std::string& process : numbers_in("/proc")) {
        if (process == own || !has_locked(process, file)) continue;
        (found += found.empty() ? "process " : ", process ") += process;
        if (std::string program = program_of(process); !program.empty())
          ((found += " (") += program) += ')';
      }
      if (found.empty() && has_locked(own, file))
        found = "another sink of this process, which is to be closed first";
    }
    return found.empty() ? "another process" : found;
  }

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
  void begin_at(std::uint64_t end) {
    end_ = end;
    if (!cut_rest()) fail("shorten", errno);
  }

  // Appends pieces, in one system call where the system takes them, of units that end at `ends`. On
  // an error, which is thrown, those that found room are in the file; `written` is how many.
  void append(std::span<iovec> pieces, std::span<const std::size_t> ends, std::size_t& written) {
    written = 0;
    if (torn_ && !cut_rest()) fail("shorten", errno);
    torn_ = true;
    std::size_t bytes = 0;
    for (const iovec& piece : pieces) bytes += piece.iov_len;
    const Transfer done = transfer_all(bytes, ENOSPC, [&](std::size_t) {
      const auto count = static_cast<int>(std::min(pieces.size(), kMostPieces));
      const ssize_t moved = ::writev(fd(), pieces.data(), count);
      if (moved > 0) pieces = without(pieces, static_cast<std::size_t>(moved));
      return moved;
    });
    const auto whole = std::ranges::upper_bound(ends, done.bytes);
    written = static_cast<std::size_t>(whole - ends.begin());
    if (done.error == 0) {
      end_ += bytes;
      torn_ = false;
      return;
    }
    if (written != 0) end_ += ends[written - 1];
    cut_rest();  // else it is cut off before the next
    fail("write to", done.error);
  }

 private:
  static constexpr std::size_t kMostPieces = 1024;  // IOV_MAX of Linux and macOS

  // The pieces without their first bytes.
  static std::span<iovec> without(std::span<iovec> pieces, std::size_t bytes) noexcept {
    for (; bytes >= pieces.front().iov_len && pieces.size() > 1; pieces = pieces.subspan(1))
      bytes -= pieces.front().iov_len;
    pieces.front().iov_base = static_cast<char*>(pieces.front().iov_base) + bytes;
    pieces.front().iov_len -= bytes;
    return pieces;
  }

  bool cut_rest() noexcept {
    torn_ = !cut(end_) || ::lseek(fd(), static_cast<off_t>(end_), SEEK_SET) < 0;
    return !torn_;
  }

  std::uint64_t end_ = 0;
  bool torn_ = false;  // bytes of units that failed may be behind `end_`
};

}  // namespace callgate
