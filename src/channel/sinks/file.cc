// POSIX calls, each repeated when a signal interrupts it.
#include "channel/sinks/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <system_error>

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

}  // namespace callgate
