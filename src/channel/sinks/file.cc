// POSIX calls, each repeated when a signal interrupts it.
#include "channel/sinks/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "channel/first_error.h"
#include "core/error.h"

namespace callgate {
namespace {

constexpr std::size_t kReadBytes = std::size_t{1} << 16;

// Repeats write_some(rest, done), a system call, until all is written or it fails.
template <typename WriteSome>
Written write_all(std::string_view bytes, WriteSome&& write_some) noexcept {
  Written result;
  while (result.bytes < bytes.size()) {
    const ssize_t written = write_some(bytes.substr(result.bytes), result.bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      result.error = written < 0 ? errno : ENOSPC;
      break;
    }
    result.bytes += static_cast<std::size_t>(written);
  }
  return result;
}

// The bytes that are locked.
constexpr off_t kTurn = off_t{1} << 61, kPlace = kTurn + 1;
// Turns are short; one that does not end is that of a process which has been stopped.
constexpr auto kLongTurn = std::chrono::seconds(10);
constexpr auto kLongPause = std::chrono::microseconds(2000);

enum class Got { kLock, kBusy, kNothing };  // kNothing: no locks on this file system

Got lock_byte(int fd, off_t byte, short type) noexcept {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  int done = 0;
  do {
    done = fcntl(fd, F_OFD_SETLK, &lock);
  } while (done != 0 && errno == EINTR);
  if (done == 0) return Got::kLock;
  return errno == EAGAIN || errno == EACCES ? Got::kBusy : Got::kNothing;
}

// The names in a folder that are numbers.
std::vector<std::string> numbers_in(const std::string& folder) {
  std::vector<std::string> names;
  std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), &closedir);
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open.get()))
    if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') names.emplace_back(entry->d_name);
  return names;
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Whether a process has the file open and locked.
bool has_locked(const std::string& process, const struct stat& file) {
  const std::string files = "/proc/" + process + "/fd/";
  const std::string positions = "/proc/" + process + "/fdinfo/";
  for (const std::string& fd : numbers_in(files)) {
    struct stat open{};
    if (stat(std::string(files).append(fd).c_str(), &open) != 0) continue;
    if (open.st_dev != file.st_dev || open.st_ino != file.st_ino) continue;
    if (contents_of(std::string(positions).append(fd)).find("lock:") != std::string::npos)
      return true;
  }
  return false;
}

// What a process was started as, shortened.
std::string program_of(const std::string& process) {
  std::string words = contents_of("/proc/" + process + "/cmdline");
  std::replace(words.begin(), words.end(), '\0', ' ');
  std::erase_if(words, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  while (words.ends_with(' ')) words.pop_back();
  if (words.size() > 80) words = words.substr(0, 77) + "...";
  return words;
}

}  // namespace

Written write_at(int fd, std::uint64_t offset, std::string_view bytes) noexcept {
  return write_all(bytes, [&](std::string_view rest, std::size_t done) {
    return ::pwrite(fd, rest.data(), rest.size(), static_cast<off_t>(offset + done));
  });
}

File::File(std::string_view sink, const std::string& path, FileMode mode, Place place, bool appends)
    : sink_(sink), path_(path), place_(place) {
  std::error_code ignored;  // open() reports a folder that could not be made
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | (appends ? O_APPEND : 0);
  do {
    fd_ = UniqueFd(::open(path.c_str(), flags, 0666));
  } while (!fd_ && errno == EINTR);
  if (!fd_) fail("open", errno);
  struct stat status{};
  regular_ = ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  lock_ = std::make_unique<FileLock>(fd_.get(), "the sink " + sink_ + ", '" + path_ + "'");
  if (!regular_) return;
  const std::lock_guard turn(*lock_);
  lock_->take_place(place_);
  if (mode == FileMode::kCreate) truncate(0);
  lock_->leave();  // an idle sink is in nobody's way
}

void File::claim() {
  lock_->check_process();
  if (!regular_ || lock_->has_place()) return;
  const std::lock_guard turn(*lock_);
  lock_->take_place(place_);
}

std::uint64_t File::size() const {
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) fail("read the size of", errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::truncate(std::uint64_t size) {
  if (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) fail("shorten", errno);
}

Written File::append(std::string_view bytes) noexcept {
  return write_all(bytes, [&](std::string_view rest, std::size_t) {
    return ::write(fd_.get(), rest.data(), rest.size());
  });
}

std::string File::read_at(std::uint64_t offset, std::size_t count) const {
  std::string bytes(count, '\0');
  std::size_t done = 0;
  while (done < count) {
    ssize_t got =
        ::pread(fd_.get(), bytes.data() + done, count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno != EINTR) fail("read", errno);
    if (got == 0) break;
    if (got > 0) done += static_cast<std::size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

void File::close() {
  if (!fd_) return;
  lock_->leave();
  // Not repeated after EINTR: Linux has closed the descriptor by then.
  if (::close(fd_.release()) != 0 && errno != EINTR) fail("close", errno);
}

void File::fail(const char* doing, int error) const {
  const std::string reason = std::generic_category().message(error);
  throw Error(error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInternal,
              "the sink " + sink_ + " cannot " + doing + " '" + path_ + "': " + reason);
}

LineFile::LineFile(std::string_view sink, const std::string& path, FileMode mode, Place place,
                   IsWhole is_whole)
    : file_(sink, path, mode, place, /*appends=*/true), place_(place), is_whole_(is_whole) {
  if (!file_.regular()) return;
  const std::lock_guard turn(file_.lock());
  mend_end();
}

void LineFile::append(std::string_view lines, std::uint64_t& written) {
  written = 0;
  file_.claim();
  std::unique_lock<FileLock> turn(file_.lock(), std::defer_lock);
  std::uint64_t start = 0;
  if (file_.regular()) {
    if (place_ == Place::kShared) turn.lock();
    mend_end();  // another process may have been killed in its turn
    start = file_.size();
  }
  const Written done = file_.append(lines);
  std::string_view whole = lines.substr(0, done.bytes);
  whole = whole.substr(0, whole.rfind('\n') + 1);  // npos + 1 is 0
  written = static_cast<std::uint64_t>(std::count(whole.begin(), whole.end(), '\n'));
  if (done.error == 0) return;
  // What is left of a line would stand before the next: where it can't be cut off now, the next
  // turn does.
  if (file_.regular() && whole.size() != done.bytes)
    FirstError().survives([&] { file_.truncate(start + whole.size()); });
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

// -- locks ---------------------------------------------------------------------------------------

std::string lock_holders(int fd) {
  struct stat file{};
  std::string found;
  if (fstat(fd, &file) == 0) {
    for (const std::string& process : numbers_in("/proc")) {
      if (process == std::to_string(getpid()) || !has_locked(process, file)) continue;
      (found += found.empty() ? "process " : ", process ") += process;
      if (std::string program = program_of(process); !program.empty())
        ((found += " (") += program) += ')';
    }
    if (found.empty() && has_locked(std::to_string(getpid()), file))
      found = "another sink of this process, which is to be closed first";
  }
  return found.empty() ? "another process" : found;
}

bool lock_alone(int fd, const std::string& what) {
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno != EWOULDBLOCK) return false;
  throw Error(ErrorCode::kAlreadyExists,
              what + ": another writer has it open: " + lock_holders(fd));
}

FileLock::FileLock(int fd, std::string what) : fd_(fd), what_(std::move(what)) {}

void FileLock::lock() {
  check_process();
  const auto end = std::chrono::steady_clock::now() + kLongTurn;
  for (std::chrono::microseconds pause(20);; pause = std::min(2 * pause, kLongPause)) {
    if (lock_byte(fd_, kTurn, F_WRLCK) != Got::kBusy) return;
    if (std::chrono::steady_clock::now() > end)
      throw Error(ErrorCode::kDeadlineExceeded,
                  what_ + ": nothing can be written, since for 10 s it has been locked by " +
                      lock_holders(fd_));
    std::this_thread::sleep_for(pause);
  }
}

void FileLock::unlock() noexcept {
  if (getpid() == process_) lock_byte(fd_, kTurn, F_UNLCK);
}

void FileLock::take_place(Place place) {
  if (has_place_) return;
  if (lock_byte(fd_, kPlace, place == Place::kAlone ? F_WRLCK : F_RDLCK) == Got::kBusy)
    throw Error(ErrorCode::kAlreadyExists, what_,
                place == Place::kAlone ? "a file that nobody else writes to"
                                       : "a file that others append to, if at all",
                "one that is written by " + lock_holders(fd_));
  has_place_ = true;
}

void FileLock::leave() noexcept {
  if (std::exchange(has_place_, false) && getpid() == process_) lock_byte(fd_, kPlace, F_UNLCK);
}

void FileLock::check_process() const {
  if (getpid() == process_) return;
  throw Error(ErrorCode::kAborted, what_ + ": expected to be used by the process that made it, " +
                                       std::to_string(process_) + ", got a fork of that, " +
                                       std::to_string(getpid()) + "; make a sink of its own there");
}

}  // namespace callgate
