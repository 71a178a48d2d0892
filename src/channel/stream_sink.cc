// See the header.
#include "channel/stream_sink.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "callgate/stream.h"
#include "channel/consumer.h"
#include "channel/first_error.h"
#include "channel/sinks/file.h"
#include "core/error.h"

namespace callgate {
namespace {

// What is gathered before it is written, so that a large batch needs no second copy in memory.
constexpr std::size_t kBatchBytes = std::size_t{1} << 20;
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

StreamSink::StreamSink(std::string destination, StreamServer::Limits limits,
                       std::int32_t process_index)
    : destination_(std::move(destination)),
      limits_(limits),
      encoder_(StreamEncoder::kExternalBytes, process_index) {
  start();
}

void StreamSink::start() {
  StreamAddress address = parse_stream_address(destination_);
  if (address.transport == StreamTransport::kFile) {
    file_.emplace(address.path);
    encoder_.start(batch_);
    write();
  } else {
    encoder_.start(batch_);
    batch_.clear();  // readers get the preamble when they connect
    server_.reset();
    server_.emplace(address, limits_, encoder_.preamble());
  }
  in_session_ = true;
  closed_ = false;
}

void StreamSink::open() {
  if (closed_ && process_.here()) start();
}

StreamSink::~StreamSink() {
  FirstError().survives([&] { close(); });  // nobody is left to tell
}

void StreamSink::consume(std::span<const Record> records) {
  if (!process_.here()) return;  // the file and the readers are the parent's
  auto take = [&](const Record& record) {
    add(record);
    if (batch_.bytes.size() >= kBatchBytes) failure_.survives([&] { write(); });
  };
  auto finish = [&] {
    failure_.survives([&] { write(); });
    failure_.rethrow();
  };
  consume_each(*this, records, [&] { open(); }, take, finish);
}

void StreamSink::add(const Record& record) {
  // After a write that failed: readers may have seen nothing of it, descriptions included.
  if (!in_session_) encoder_.start(batch_);
  in_session_ = true;
  // Readers leave out the lanes whose sizes the array has not; they are lost, and said to be so.
  FirstError refused;
  if (!record.source->padded.empty()) {
    RecordViews views(*record.source);
    std::uint64_t good = 0;
    refused.survives([&] { visit_lanes(*this, views, record, [&](auto, auto) { ++good; }); });
    if (good == 0) refused.rethrow();
  }
  encoder_.add(record, batch_);
  ++in_batch_;
  refused.rethrow();
}

void StreamSink::write() {
  if (batch_.empty()) return;
  const std::uint64_t records = std::exchange(in_batch_, 0);
  std::uint64_t written = 0;
  try {
    if (file_) file_->write(batch_, written);
    if (server_) server_->send(batch_, encoder_.preamble());
    batch_.clear();
  } catch (...) {
    lose(records - written);
    batch_.clear();
    in_session_ = false;
    throw;
  }
}

void StreamSink::close() {
  if (closed_) return;
  closed_ = true;
  if (!process_.here()) {
    if (server_) server_->close();
    return;
  }
  try {
    if (in_session_) {
      encoder_.finish(batch_);
      write();
    }
  } catch (...) {
    server_.reset();
    if (file_) file_->close();
    throw;
  }
  if (file_) file_->close();
  if (server_) server_->close();
}

std::string StreamSink::address() const {
  if (file_) return file_->path();
  return server_ ? server_->address().text() : "";
}

// -- the file ------------------------------------------------------------------------------------

StreamFile::StreamFile(std::string path)
    : path_(std::move(path)), fd_(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  struct stat status{};
  if (!fd_ || fstat(fd_.get(), &status) != 0) fail("opening");
  if (!S_ISREG(status.st_mode)) return;  // a device or a named pipe is only written to
  if (!lock_alone(fd_.get(), "stream file '" + path_ + "'")) fail("locking");
  if (!may_be_stream(fd_.get()))
    throw Error(ErrorCode::kInvalidArgument, "stream file '" + path_ + "'",
                "a new file or a stream to append to", "a file of another kind");
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
