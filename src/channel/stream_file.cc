// See the header.
#include "channel/stream_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "callgate/stream.h"
#include "channel/file_lock.h"
#include "channel/first_error.h"
#include "core/error.h"

namespace callgate {
namespace {

constexpr std::size_t kMaxPieces = 1024;  // IOV_MAX of Linux and macOS

// Where the last whole frame ends.
std::uint64_t whole_bytes(const std::string& path) {
  try {
    stream::Reader reader(path);
    while (reader.next()) {
    }
    return reader.offset();
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kInvalidArgument,
                "stream file '" + path + "': can't be appended to: " + error.what());
  }
}

// Whether the few bytes of a file could be the beginning of a stream, or zeros in its place: the
// reader says whether they go on to the end, as after a power loss.
bool may_be_stream(int fd) {
  char head[5] = {};
  ssize_t got = pread(fd, head, sizeof(head) - 1, 0);
  return got >= 0 && std::string_view("cgsS").starts_with(head);
}

// Drops the first `written` bytes from the pieces [first, end).
void advance(std::vector<iovec>& pieces, std::size_t& first, std::size_t written) {
  while (first < pieces.size() && written >= pieces[first].iov_len)
    written -= pieces[first++].iov_len;
  if (written == 0) return;
  pieces[first].iov_base = static_cast<char*>(pieces[first].iov_base) + written;
  pieces[first].iov_len -= written;
}

}  // namespace

StreamFile::StreamFile(std::string path)
    : path_(std::move(path)), fd_(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  struct stat status{};
  if (!fd_ || fstat(fd_.get(), &status) != 0) fail("opening");
  if (!S_ISREG(status.st_mode)) return;  // a device or a named pipe is only written to
  if (!lock_alone(fd_.get(), "stream file '" + path_ + "'")) fail("locking");
  if (!may_be_stream(fd_.get())) {
    throw Error(ErrorCode::kInvalidArgument, "stream file '" + path_ + "'",
                "a new file or a stream to append to", "a file of another kind");
  }
  size_ = whole_bytes(path_);
  cut();
}

void StreamFile::cut() {
  if (ftruncate(fd_.get(), static_cast<off_t>(size_)) != 0) fail("cutting off its torn end");
  if (lseek(fd_.get(), static_cast<off_t>(size_), SEEK_SET) < 0) fail("seeking");
  torn_ = false;
}

void StreamFile::write(const StreamBatch& batch, std::uint64_t& records) {
  records = 0;
  if (torn_) cut();
  pieces_.clear();
  std::uint64_t total = 0;
  batch.each_piece([&](const char* data, std::size_t size) {
    pieces_.push_back({const_cast<char*>(data), size});  // iovec has no const form
    total += size;
  });
  torn_ = true;
  std::uint64_t done = 0;
  for (std::size_t first = 0; first < pieces_.size();) {
    auto count = static_cast<int>(std::min(pieces_.size() - first, kMaxPieces));
    ssize_t written = writev(fd_.get(), pieces_.data() + first, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      int reason = errno;
      keep_whole_frames(done, records);
      errno = reason;
      fail("writing");
    }
    done += static_cast<std::uint64_t>(written);
    advance(pieces_, first, static_cast<std::size_t>(written));
  }
  size_ += total;
  torn_ = false;
}

// Of `written` bytes at the end, keeps the frames that are whole, if there are records among them.
void StreamFile::keep_whole_frames(std::uint64_t written, std::uint64_t& records) {
  const std::uint64_t end = size_ + written;
  std::uint64_t whole = size_;
  char head[stream::kHeaderBytes];
  while (end - whole >= sizeof(head)) {
    if (pread(fd_.get(), head, sizeof(head), static_cast<off_t>(whole)) != sizeof(head)) break;
    std::uint64_t length = 0;
    std::memcpy(&length, head + 8, sizeof(length));
    if (length > end - whole) break;
    records += head[3] == 'R' ? 1 : 0;
    whole += length;
  }
  if (records != 0) size_ = whole;
  FirstError().survives([&] { cut(); });  // else torn_ stays, and the next write cuts
}

void StreamFile::close() noexcept {
  // A child that was forked meanwhile has the file open, and would keep the lock for its life.
  if (fd_ && getpid() == process_) flock(fd_.get(), LOCK_UN);
  fd_ = UniqueFd();
}

void StreamFile::fail(const std::string& step) const {
  throw Error(ErrorCode::kInvalidArgument,
              "stream file '" + path_ + "': " + step + ": " + std::strerror(errno));
}

}  // namespace callgate
