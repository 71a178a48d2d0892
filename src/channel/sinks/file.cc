// POSIX calls, each repeated when a signal interrupts it.
#include "channel/sinks/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace callgate {
namespace {

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
  Turn turn(*lock_);
  lock_->take_place(place_);
  if (mode == FileMode::kCreate) truncate(0);
  lock_->leave();  // an idle sink is in nobody's way
}

void File::claim() {
  lock_->check_process();
  if (!regular_ || lock_->has_place()) return;
  Turn turn(*lock_);
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

Written File::write_at(std::uint64_t offset, std::string_view bytes) noexcept {
  return write_all(bytes, [&](std::string_view rest, std::size_t done) {
    return ::pwrite(fd_.get(), rest.data(), rest.size(), static_cast<off_t>(offset + done));
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

}  // namespace callgate
