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

File::File(std::string_view sink, const std::string& path, FileMode mode)
    : sink_(sink), path_(path) {
  std::error_code ignored;  // open() reports a folder that could not be made
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  int flags = O_RDWR | O_CREAT | O_CLOEXEC | (mode == FileMode::kCreate ? O_TRUNC : 0);
  do {
    descriptor_ = ::open(path.c_str(), flags, 0666);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) fail("open");
  struct stat status{};
  regular_ = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File::File(File&& other) noexcept
    : sink_(std::move(other.sink_)),
      path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      regular_(other.regular_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(sink_, other.sink_);
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(regular_, other.regular_);
  return *this;
}

std::uint64_t File::size() const {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) fail("read the size of");
  return static_cast<std::uint64_t>(status.st_size);
}

void File::truncate(std::uint64_t size) {
  if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) fail("shorten");
}

void File::append(std::string_view bytes) {
  if (regular_) {
    const std::uint64_t end = size();
    try {
      write_at(end, bytes);
    } catch (...) {
      if (::ftruncate(descriptor_, static_cast<off_t>(end)) != 0)
        errno = 0;  // the first error counts
      throw;
    }
    return;
  }
  while (!bytes.empty()) {
    ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) fail("write to");
    if (written > 0) bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

void File::write_at(std::uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno != EINTR) fail("write to");
    if (written <= 0) continue;
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

std::string File::read_at(std::uint64_t offset, std::size_t count) const {
  std::string bytes(count, '\0');
  std::size_t done = 0;
  while (done < count) {
    ssize_t got =
        ::pread(descriptor_, bytes.data() + done, count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno != EINTR) fail("read");
    if (got == 0) break;
    if (got > 0) done += static_cast<std::size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

void File::close() {
  if (descriptor_ < 0) return;
  // Not repeated after EINTR: Linux has closed the descriptor by then.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail("close");
}

void File::fail(const char* doing) const {
  const std::string reason = std::generic_category().message(errno);
  throw Error(errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInternal,
              "the sink " + sink_ + " cannot " + doing + " '" + path_ + "': " + reason);
}

}  // namespace callgate
