// See the header.
#include "channel/outfeed_2020_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <string_view>
#include <utility>

#include "channel/file_lock.h"
#include "channel/sinks/consume_each.h"
#include "core/error.h"

namespace callgate {
namespace {

constexpr std::size_t kWriteBytes = std::size_t{1} << 20;

[[noreturn]] void fail(const std::string& path, const std::string& step) {
  throw Error(ErrorCode::kInvalidArgument,
              "outfeed file '" + path + "': " + step + ": " + std::strerror(errno));
}

// Gives the lock of a file back, which a child that was forked meanwhile would keep for its life.
struct Unlock {
  int fd;
  ~Unlock() { flock(fd, LOCK_UN); }
};

bool sends_a_lane(const Record& record) {
  if (!record.source->has_where) return true;
  bool sends = false;
  RecordViews(*record.source).each_lane(record, [&](std::int64_t, auto) { sends = true; });
  return sends;
}

}  // namespace

Outfeed2020Sink::Outfeed2020Sink(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666)) {
  struct stat status{};
  if (!fd_ || fstat(fd_.get(), &status) != 0) fail(path_, "opening");
  if (!S_ISREG(status.st_mode)) return;
  if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw Error(
        ErrorCode::kAlreadyExists,
        "outfeed file '" + path_ + "': another writer has it open: " + lock_holders(fd_.get()));
  }
  if (ftruncate(fd_.get(), 0) != 0) fail(path_, "emptying");
}

Outfeed2020Sink::~Outfeed2020Sink() {
  try {
    close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to tell
  }
}

const std::string& Outfeed2020Sink::header_of(const Source& source) {
  auto found = headers_.find(source.id);
  if (found != headers_.end()) return found->second;
  std::vector<outfeed_2020::ArrayType> arrays;
  arrays.reserve(source.value_leaves);
  for (std::size_t i = 0; i < source.value_leaves; ++i)
    arrays.push_back({source.leaves[i].dtype, source.leaves[i].dims});
  std::string header;
  try {
    header = outfeed_2020::encode_header(source.id, outfeed_2020::encode_metadata(arrays));
  } catch (const Error& error) {
    throw Error(error.code(), "outfeed file '" + path_ + "': the values of '" + source.name +
                                  "' can't be written: " + error.what());
  }
  return headers_.emplace(source.id, std::move(header)).first->second;
}

void Outfeed2020Sink::add(const Record& record) {
  const Source& source = *record.source;
  const std::string& header = header_of(source);
  if (!sends_a_lane(record)) return;
  const std::size_t start = buffer_.size();
  try {
    buffer_.append(header);
    for (std::size_t i = 0; i < source.value_leaves; ++i) {
      const LeafType& leaf = source.leaves[i];
      if (leaf.nbytes != 0) buffer_.append(record.data(leaf), leaf.nbytes);
    }
    ends_.push_back(buffer_.size());
  } catch (...) {
    buffer_.resize(start);  // no half of a message
    throw;
  }
  if (buffer_.size() >= kWriteBytes) write_out();
}

// What finds no room is lost, and counted.
void Outfeed2020Sink::write_out() noexcept {
  try {
    write();
  } catch (...) {
    if (failure_ == nullptr) failure_ = std::current_exception();
  }
}

void Outfeed2020Sink::consume(std::span<const Record> records) {
  if (closed_) return;
  auto finish = [&] {
    write_out();
    if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  };
  consume_each(*this, records, [&](const Record& record) { add(record); }, finish);
}

void Outfeed2020Sink::write() {
  std::string bytes = std::exchange(buffer_, {});
  const std::vector<std::size_t> ends = std::exchange(ends_, {});
  std::string_view rest = bytes;
  while (!rest.empty()) {
    ssize_t written = pwrite(fd_.get(), rest.data(), rest.size(),
                             static_cast<off_t>(size_ + bytes.size() - rest.size()));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      int reason = errno;
      // Half a message would stand between this one and the next; those that are whole stay.
      auto lost = std::ranges::upper_bound(ends, bytes.size() - rest.size());
      lose(static_cast<std::uint64_t>(ends.end() - lost));
      if (lost != ends.begin()) size_ += *std::prev(lost);
      [[maybe_unused]] int cut = ftruncate(fd_.get(), static_cast<off_t>(size_));
      errno = reason;
      fail(path_, "writing");
    }
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  size_ += bytes.size();
  bytes.clear();
  buffer_ = std::move(bytes);  // with its memory
}

void Outfeed2020Sink::close() {
  if (closed_) return;
  closed_ = true;
  const Unlock unlock{fd_.get()};
  buffer_ = outfeed_2020::encode_header(0, "");
  write();
}

Outfeed2020Reader::Outfeed2020Reader(std::string path)
    : path_(std::move(path)), fd_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (!fd_) fail(path_, "opening");
}

bool Outfeed2020Reader::read(std::uint64_t offset, std::uint64_t size, std::string& bytes) const {
  struct stat status{};
  if (fstat(fd_.get(), &status) != 0) fail(path_, "reading");
  auto there = static_cast<std::uint64_t>(status.st_size);
  if (offset > there || size > there - offset) return false;  // before memory is taken for it
  bytes.resize(static_cast<std::size_t>(size));
  for (std::size_t have = 0; have < bytes.size();) {
    ssize_t got = pread(fd_.get(), bytes.data() + have, bytes.size() - have,
                        static_cast<off_t>(offset + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, "reading");
    if (got == 0) return false;
    have += static_cast<std::size_t>(got);
  }
  return true;
}

std::optional<Outfeed2020Reader::Message> Outfeed2020Reader::next() {
  try {
    std::string blocks;
    if (!read(offset_, outfeed_2020::kBlockBytes, blocks)) return std::nullopt;
    outfeed_2020::Header header = outfeed_2020::decode_header(blocks);
    if (!read(offset_, header.size(), blocks)) return std::nullopt;
    Message message{header.consumer, {}, "", false};
    message.arrays = outfeed_2020::decode_metadata(outfeed_2020::metadata_of(header, blocks));
    std::uint64_t bytes = 0;
    for (const outfeed_2020::ArrayType& array : message.arrays) {
      bytes += array.nbytes();
      if (bytes > (std::uint64_t{1} << 60)) return std::nullopt;  // more than any file has
    }
    if (!read(offset_ + header.size(), bytes, message.data)) return std::nullopt;
    message.end = header.consumer == 0 && message.arrays.empty();
    offset_ += header.size() + bytes;
    return message;
  } catch (const Error& error) {
    throw Error(error.code(), "outfeed file '" + path_ + "', at byte " + std::to_string(offset_) +
                                  ": " + error.what());
  }
}

}  // namespace callgate
