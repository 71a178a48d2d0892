// SPDX-License-Identifier: Apache-2.0
// Reads callgate's stream format, the records of taps, from a file, a socket or memory, in C++17.
//
// This header and crc32c.h have no other dependencies: no XLA, no Python. A Reader
// belongs to one thread at a time. All integers are little-endian; big-endian machines are not
// supported.
//
// A stream is a sequence of frames. Each begins at a multiple of 8 bytes:
//
//   frame     0  u8[4]  "cgs" and the kind: 'S' session, 'D' description, 'R' record, 'E' end,
//                       'X' refusal
//             4  u32    CRC-32C (Castagnoli) of the body, that is, of the bytes [24, length)
//             8  u64    length of the whole frame, these 24 bytes included, a multiple of 8
//            16  u32    0
//            20  u32    CRC-32C of the bytes [0, 20)
//            24         body, by kind; a reader skips bytes behind the fields that it knows
//
//   'S'      24  u32    version, 1                    A writer's first frame. One that appends to
//            28  u32    process id of the writer      a file writes another; sources of the
//            32  i64    time, ns since the epoch      session before are forgotten then.
//            40  i32    index of the writer's process among those of its program, -1 when the
//                       writer did not know it; streams before this field end here
//            44  u32    0
//
//   'D'      24  u32    number of the source in this session: 0, 1, 2, ...
//            28  u8     role: 0 primal, 1 tangent, 2 cotangent
//            29  u8     1 when leaf `value leaves` is a bool for each lane: was the lane sent?
//            30  u16    0
//            32  u64    id of the source in the writer's process
//            40  u32    bytes of the name             44  u32  bytes of the description
//            48  u32    bytes of the lanes            52  u32  number of leaves
//            56  u32    number of value leaves        60  u32  0
//            64         name (UTF-8), description (JSON), lanes; each padded to 8 bytes by zeros
//                       lanes: the batch levels, outermost first, "SIZE:MASK;SIZE:MASK", one digit
//                       a leaf in each mask, 1 where the leaf has the level as a leading axis;
//                       the lanes of a record are 2^20 or no more than the bits of its payload. A
//                       level that no leaf has is numbered: the program sends a record for each of
//                       its lanes, and the leaf behind the value leaves, and behind the bool, is an
//                       int32, the lane's row-major number in all numbered levels
//   leaf      0  u32    code of the dtype (XLA_FFI_DataType)     4  u32  bits of one element
//             8  u32    number of dims                          12  u32  bytes of the dtype's name
//            16  u32    bytes of the path                       20  u32  0
//            24  i64[]  dims, outermost first, batch levels included
//                       dtype's name as NumPy or ml_dtypes has it, path; each padded to 8 bytes
//
//   'R'      24  u32    number of its source          28  u32  flags: 1 repeated;
//                                                             from bit 8 on, the number of the
//                                                             shard plus 1; 0 for whole arrays
//            32  u64    sequence number               40  i64  time, ns since the epoch
//            48  i64    run                           56  i32  device        60  u32  0
//            64         each leaf's elements, row-major, padded to 8 bytes; elements of less than
//                       8 bits are packed, the first in the lowest bits
//
//   'E'      24  u64    records of this session       32  i64  time: the writer closed the stream
//
//   'X'      24  u32    bytes of the text             28  u32  0
//            32         the reason why a server refuses this reader (UTF-8), padded to 8 bytes by
//                       zeros; the only frame of its connection
//
// A file that ends within a frame is being written, or its writer was killed. Its whole frames
// count, and the next writer cuts the rest off. The same holds for a file whose bytes are zero from
// some byte of a frame to the end, if they include the beginning of a sector: after a power loss,
// file systems have the length of data that was never written. Any other deviation raises
// FormatError.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "callgate/crc32c.h"

namespace callgate::stream {

inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::size_t kHeaderBytes = 24;
inline constexpr std::size_t kRecordBytes = 64;  // of an 'R' frame, before its payload
inline constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 60;
inline constexpr std::uint32_t kMaxRank = 64;                        // NumPy's
inline constexpr std::uint64_t kFreeLanes = std::uint64_t{1} << 20;  // also for empty leaves

constexpr std::size_t pad8(std::size_t bytes) noexcept { return (bytes + 7) & ~std::size_t{7}; }

// Bytes that aren't a stream, or a damaged stream. The records before `offset()` have been read.
class FormatError : public std::runtime_error {
 public:
  FormatError(std::uint64_t offset, const std::string& what)
      : std::runtime_error("at byte " + std::to_string(offset) + ": " + what), offset_(offset) {}
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  std::uint64_t offset_;
};

// The server doesn't serve this reader; the message has its reason.
class RefusedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Leaf {
  std::string path, dtype;
  std::uint32_t code = 0, bits = 0;
  std::vector<std::int64_t> dims;
  std::size_t offset = 0, nbytes = 0;  // in the payload
};

struct Level {
  std::int64_t size = 0;
  std::string mask;  // '0' or '1' per leaf
};

struct Source {
  std::uint32_t number = 0;
  std::uint64_t id = 0;
  std::string name, description, lanes;
  int role = 0;
  bool has_where = false;
  std::vector<Level> levels;  // `lanes`, parsed
  std::vector<Leaf> leaves;   // value leaves, then control leaves
  std::size_t value_leaves = 0, payload_bytes = 0;
};

struct Session {
  std::uint32_t version = 0, process = 0;
  std::int64_t time_ns = 0;
  std::int32_t process_index = -1;
};

struct Record {
  std::shared_ptr<const Source> source;
  std::uint64_t seq = 0;
  std::int64_t time_ns = 0, run = -1;
  std::int32_t device = -1;
  std::uint32_t flags = 0;
  const char* payload = nullptr;  // source->payload_bytes, until the next use of the reader

  // The sending device's position in its program; -1 for whole arrays. The source's description has
  // the part of the array.
  std::int32_t shard() const noexcept { return static_cast<std::int32_t>(flags >> 8) - 1; }
  const char* data(const Leaf& leaf) const noexcept { return payload + leaf.offset; }
};

namespace internal {

// Reads fields of one frame, never past its end.
class Cursor {
 public:
  Cursor(const char* data, std::size_t size, std::uint64_t offset)
      : data_(data), left_(size), offset_(offset) {}

  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string text(std::uint32_t size) { return std::string(take(pad8(size)), size); }
  std::size_t left() const noexcept { return left_; }
  [[noreturn]] void fail(const std::string& what) const { throw FormatError(offset_, what); }
  const char* take(std::size_t size) {
    if (size > left_) fail("a frame that is too short for its content");
    const char* start = data_;
    data_ += size;
    left_ -= size;
    return start;
  }

 private:
  const char* data_;
  std::size_t left_;
  std::uint64_t offset_;
};

inline Leaf parse_leaf(Cursor& in) {
  Leaf leaf;
  leaf.code = in.get<std::uint32_t>();
  leaf.bits = in.get<std::uint32_t>();
  auto rank = in.get<std::uint32_t>(), dtype = in.get<std::uint32_t>();
  auto path = in.get<std::uint32_t>();
  in.get<std::uint32_t>();
  if (leaf.bits == 0 || leaf.bits > 1024) in.fail("a leaf with an invalid element size");
  if (rank > in.left() / 8 || rank > kMaxRank) in.fail("a leaf with too many dims");
  leaf.dims.resize(rank);
  std::uint64_t elements = 1, most = 1;  // most: as if no extent were 0
  for (std::int64_t& dim : leaf.dims) {
    dim = in.get<std::int64_t>();
    auto extent = static_cast<std::uint64_t>(dim);
    if (dim < 0 || (extent != 0 && most > kMaxBytes / 1024 / extent))
      in.fail("a leaf with a negative dim, or larger than any memory");
    most *= extent == 0 ? 1 : extent;
    elements *= extent;
  }
  leaf.nbytes = static_cast<std::size_t>((elements * leaf.bits + 7) / 8);
  leaf.dtype = in.text(dtype);
  leaf.path = in.text(path);
  return leaf;
}

// One "SIZE:MASK" of a source's lanes.
inline Level parse_level(const Cursor& in, const std::string& text, std::size_t leaves) {
  std::size_t colon = text.find(':');
  if (colon == 0 || colon > 18 || text.find_first_not_of("0123456789") != colon)
    in.fail("lanes that are not SIZE:MASK;SIZE:MASK");
  Level level{static_cast<std::int64_t>(std::stoll(text.substr(0, colon))), text.substr(colon + 1)};
  if (level.mask.size() != leaves || level.mask.find_first_not_of("01") != std::string::npos)
    in.fail("lanes without one 0 or 1 for each leaf");
  return level;
}

inline bool is_numbered(const Level& level) { return level.mask.find('1') == std::string::npos; }

// True if there is a leaf with the number of a lane.
inline bool has_number(const Source& source) {
  constexpr std::uint32_t kS32 = 4;  // XLA_FFI_DataType
  const std::size_t index = source.value_leaves + (source.has_where ? 1 : 0);
  return index < source.leaves.size() && source.leaves[index].code == kS32 &&
         source.leaves[index].dims.empty();
}

inline void parse_levels(const Cursor& in, Source& source) {
  for (std::size_t start = 0; !source.lanes.empty() && start <= source.lanes.size();) {
    std::size_t end = std::min(source.lanes.find(';', start), source.lanes.size());
    source.levels.push_back(
        parse_level(in, source.lanes.substr(start, end - start), source.leaves.size()));
    start = end + 1;
  }
  // A reader iterates over all lanes, so there are at most as many lanes as bits in the payload.
  std::uint64_t lanes = 1, most = std::max<std::uint64_t>(kFreeLanes, 8 * source.payload_bytes);
  std::uint64_t numbered = 1;
  for (const Level& level : source.levels) {
    auto size = static_cast<std::uint64_t>(level.size);
    if (is_numbered(level)) {
      if (!has_number(source)) in.fail("lanes without a leaf that has them");
      if (size == 0 || numbered > std::uint64_t{INT32_MAX} / size) in.fail("lanes beyond an int32");
      numbered *= size;
      continue;
    }
    if (size != 0 && lanes > most / size) in.fail("more lanes than the leaves hold");
    lanes *= size;
  }
  for (std::size_t i = 0; i < source.leaves.size(); ++i) {
    std::size_t axis = 0;
    const std::vector<std::int64_t>& dims = source.leaves[i].dims;
    for (const Level& level : source.levels) {
      if (level.mask[i] == '0') continue;
      if (axis == dims.size() || dims[axis] != level.size)
        in.fail("lanes that are not leading axes of the leaves");
      ++axis;
    }
  }
}

inline std::shared_ptr<const Source> parse_source(Cursor& in, std::size_t number) {
  auto source = std::make_shared<Source>();
  source->number = in.get<std::uint32_t>();
  if (source->number != number) in.fail("a source out of order");
  source->role = in.get<std::uint8_t>();
  source->has_where = in.get<std::uint8_t>() != 0;
  in.get<std::uint16_t>();
  source->id = in.get<std::uint64_t>();
  auto name = in.get<std::uint32_t>(), description = in.get<std::uint32_t>();
  auto lanes = in.get<std::uint32_t>(), leaves = in.get<std::uint32_t>();
  source->value_leaves = in.get<std::uint32_t>();
  in.get<std::uint32_t>();
  if (leaves > in.left() / 24) in.fail("a source with more leaves than fit its frame");
  if (source->value_leaves > leaves || (source->has_where && source->value_leaves == leaves))
    in.fail("a source with fewer leaves than declared");
  source->name = in.text(name);
  source->description = in.text(description);
  source->lanes = in.text(lanes);
  for (std::uint32_t i = 0; i < leaves; ++i) {
    source->leaves.push_back(parse_leaf(in));
    Leaf& leaf = source->leaves.back();
    leaf.offset = source->payload_bytes;
    source->payload_bytes += pad8(leaf.nbytes);
    if (source->payload_bytes > kMaxBytes) in.fail("a source larger than any memory");
  }
  parse_levels(in, *source);
  return source;
}

}  // namespace internal

// Returns the records of a stream one after the other.
class Reader {
 public:
  // Reads a file from its beginning; throws std::runtime_error if it can't be opened.
  explicit Reader(const std::string& path) : Reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
  }

  // Reads a file descriptor and closes it at the end: a file from its beginning, a socket or pipe
  // from its current position. On a socket or pipe, next() waits for a whole frame unless the
  // descriptor is non-blocking.
  explicit Reader(int fd) : fd_(fd) {
    struct stat status{};
    file_ = fd >= 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  }

  // Reads memory, which must outlive the reader and begin at a multiple of 8 (for aligned
  // payloads).
  Reader(const void* data, std::size_t size)
      : memory_(static_cast<const char*>(data)), end_(size), ended_(true) {}

  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() {
    if (fd_ >= 0) ::close(fd_);
  }

  // The next record, or none while no further whole frame is available; a later call may find one.
  // Throws FormatError at a damaged frame and stays there. Throws RefusedError if a server refuses
  // the reader.
  std::optional<Record> next() {
    for (;;) {
      const char* head = need(kHeaderBytes);
      if (head == nullptr) return std::nullopt;
      std::uint64_t length = 0;
      try {
        length = check_header(head);
      } catch (const FormatError&) {
        if (zeros_follow(kHeaderBytes)) return std::nullopt;
        throw;
      }
      const char* frame = need(length);
      if (frame == nullptr) return std::nullopt;
      internal::Cursor body(frame + kHeaderBytes, length - kHeaderBytes, offset_);
      std::uint32_t crc = 0;
      std::memcpy(&crc, frame + 4, sizeof(crc));
      if (crc != crc32c(frame + kHeaderBytes, length - kHeaderBytes)) {
        if (zeros_follow(length)) return std::nullopt;
        body.fail("a damaged frame: the checksum differs");
      }
      std::optional<Record> record;
      if (frame[3] == 'R') record = parse_record(body);
      if (frame[3] == 'X') refuse(body);
      if (frame[3] == 'S') start(body);
      if (frame[3] == 'D') sources_.push_back(internal::parse_source(body, sources_.size()));
      closed_ = frame[3] == 'E';
      begin_ += length;
      offset_ += length;
      if (record) return record;
    }
  }

  // True if the last next() reached the end of the file, the memory or the connection.
  bool ended() const noexcept { return ended_; }
  // True if the writer has closed the stream and no other session has begun.
  bool closed() const noexcept { return closed_; }
  // The position of the first unread frame.
  std::uint64_t offset() const noexcept { return offset_; }
  int fd() const noexcept { return fd_; }
  const Session& session() const noexcept { return session_; }
  // The sources that the session has described so far.
  const std::vector<std::shared_ptr<const Source>>& sources() const noexcept { return sources_; }

 private:
  static constexpr std::size_t kChunk = std::size_t{1} << 20;

  // The next `size` bytes, or null. Allocates nothing for bytes that aren't available.
  const char* need(std::uint64_t size) {
    if (size <= end_ - begin_) return (memory_ != nullptr ? memory_ : buffer_.data()) + begin_;
    if (memory_ != nullptr) return nullptr;
    if (file_) {
      struct stat status{};
      ended_ = fstat(fd_, &status) != 0 || static_cast<std::uint64_t>(status.st_size) < size ||
               static_cast<std::uint64_t>(status.st_size) - size < offset_;
      if (ended_) return forget();
    }
    // The bytes beyond a file's last whole frame may have been cut off and rewritten.
    end_ = file_ ? 0 : end_ - begin_;
    if (end_ != 0) std::memmove(buffer_.data(), buffer_.data() + begin_, end_);
    begin_ = 0;
    while (end_ < size) {
      std::uint64_t room = file_ ? std::max<std::uint64_t>(size, kChunk) : end_ + kChunk;
      if (buffer_.size() < room) buffer_.resize(static_cast<std::size_t>(room));
      if (!fill()) return file_ ? forget() : nullptr;
    }
    return buffer_.data();
  }

  const char* forget() {
    begin_ = end_ = 0;
    return nullptr;
  }

  // True if, from some byte of the next frame of `length` bytes on, all bytes are zero to the end:
  // they were never written. The stream ends there for now.
  bool zeros_follow(std::uint64_t length) {
    std::uint64_t size = end_;
    if (file_) {
      struct stat status{};
      if (fstat(fd_, &status) != 0) return false;
      size = static_cast<std::uint64_t>(status.st_size);
    } else if (memory_ == nullptr) {
      return false;  // connections have no holes
    }
    std::uint64_t zeros = size;  // the number of zeros from here on
    char chunk[4096];
    for (bool all = true; all && zeros > offset_;) {
      auto count =
          static_cast<std::size_t>(std::min<std::uint64_t>(sizeof(chunk), zeros - offset_));
      const char* bytes = memory_ != nullptr ? memory_ + (zeros - count) : chunk;
      if (memory_ == nullptr && ::pread(fd_, chunk, count, static_cast<off_t>(zeros - count)) !=
                                    static_cast<ssize_t>(count))
        return false;
      while (count > 0 && bytes[count - 1] == 0) --count, --zeros;
      all = count == 0;
    }
    // A few zeros at the end of a frame are normal: the test needs a sector's beginning.
    constexpr std::uint64_t kSector = 512;
    const std::uint64_t sector = (zeros + kSector - 1) / kSector * kSector;
    ended_ = zeros <= offset_ || (zeros < offset_ + length && sector < size);
    if (ended_ && file_) forget();
    return ended_;
  }

  // Reads more bytes behind the available ones; false at the end, or if there are none yet.
  bool fill() {
    char* target = buffer_.data() + end_;
    std::size_t room = buffer_.size() - end_;
    ssize_t got = 0;
    do {
      got = file_ ? ::pread(fd_, target, room, static_cast<off_t>(offset_ + end_))
                  : ::read(fd_, target, room);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ECONNRESET)
      throw std::runtime_error(std::string("reading a stream: ") + std::strerror(errno));
    ended_ = got == 0 || (got < 0 && errno == ECONNRESET);
    if (got > 0) end_ += static_cast<std::size_t>(got);
    return got > 0;
  }

  // Checks a frame's header and returns its length.
  std::uint64_t check_header(const char* head) const {
    internal::Cursor in(head, kHeaderBytes, offset_);
    bool known = std::memcmp(head, "cgs", 3) == 0 &&
                 std::string_view("SDREX").find(head[3]) != std::string_view::npos;
    if (!known && offset_ == 0) in.fail("not a stream of callgate");
    in.get<std::uint64_t>();
    auto length = in.get<std::uint64_t>();
    in.get<std::uint32_t>();
    if (!known || in.get<std::uint32_t>() != crc32c(head, 20))
      in.fail("a damaged frame: no valid header");
    if (length < kHeaderBytes || length % 8 != 0 || length > kMaxBytes)
      in.fail("a frame with an invalid length");
    if (head[3] != 'S' && head[3] != 'X' && session_.version == 0)
      in.fail("a frame before any session");
    return length;
  }

  [[noreturn]] static void refuse(internal::Cursor& in) {
    auto size = in.get<std::uint32_t>();
    in.get<std::uint32_t>();
    throw RefusedError(std::string(in.take(size), size));
  }

  void start(internal::Cursor& in) {
    session_.version = in.get<std::uint32_t>();
    if (session_.version != kVersion)
      in.fail("version " + std::to_string(session_.version) + " of the format; this reads 1");
    session_.process = in.get<std::uint32_t>();
    session_.time_ns = in.get<std::int64_t>();
    session_.process_index = in.left() < sizeof(std::int32_t) ? -1 : in.get<std::int32_t>();
    sources_.clear();
  }

  Record parse_record(internal::Cursor& in) const {
    Record record;
    auto number = in.get<std::uint32_t>();
    if (number >= sources_.size()) in.fail("a record of a source that was not described");
    record.source = sources_[number];
    record.flags = in.get<std::uint32_t>();
    record.seq = in.get<std::uint64_t>();
    record.time_ns = in.get<std::int64_t>();
    record.run = in.get<std::int64_t>();
    record.device = in.get<std::int32_t>();
    in.get<std::uint32_t>();
    record.payload = in.take(record.source->payload_bytes);
    return record;
  }

  int fd_ = -1;
  bool file_ = false;  // files are re-read by offset; a socket's bytes come once
  const char* memory_ = nullptr;
  std::vector<char> buffer_;
  std::size_t begin_ = 0, end_ = 0;  // the unread bytes in the buffer or the memory
  bool ended_ = false, closed_ = false;
  std::uint64_t offset_ = 0;  // the stream position of begin_
  Session session_;
  std::vector<std::shared_ptr<const Source>> sources_;
};

}  // namespace callgate::stream
