// See the header. The msgpack here is what this metadata needs: arrays and integers.
#include "channel/outfeed_2020.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "core/error.h"

namespace callgate::outfeed_2020 {
namespace {

constexpr std::array kDTypes{
    DType::kS8,  DType::kS16,  DType::kS32,  DType::kS64, DType::kU8,
    DType::kU16, DType::kU32,  DType::kU64,  DType::kF16, DType::kF32,
    DType::kF64, DType::kBF16, DType::kPred, DType::kC64, DType::kC128,
};

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
  throw Error(ErrorCode::kInvalidArgument, "outfeed of 2020", expected, got);
}

// The low `count` bytes of a number, the highest first.
void put_big(std::string& out, std::uint64_t value, int count) {
  while (count-- > 0) out.push_back(static_cast<char>((value >> (8 * count)) & 255U));
}

// msgpack: the shortest form of a number that is not negative.
void put_number(std::string& out, std::uint64_t value) {
  if (value < 128) return put_big(out, value, 1);
  int exponent = value < (1ULL << 8) ? 0 : value < (1ULL << 16) ? 1 : value < (1ULL << 32) ? 2 : 3;
  out.push_back(static_cast<char>(0xCC + exponent));
  put_big(out, value, 1 << exponent);
}

void put_array(std::string& out, std::size_t count) {
  if (count < 16) return put_big(out, 0x90 | count, 1);
  out.push_back(static_cast<char>(count < (1U << 16) ? 0xDC : 0xDD));
  put_big(out, count, count < (1U << 16) ? 2 : 4);
}

// Reads msgpack, never beyond the end.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}

  bool done() const noexcept { return at_ == bytes_.size(); }

  // An array's length. Every element takes a byte or more, so no count exceeds what is left.
  std::size_t array() {
    std::uint64_t tag = big(1), count = 0;
    if ((tag & 0xF0) == 0x90) {
      count = tag & 0x0F;
    } else if (tag == 0xDC || tag == 0xDD) {
      count = big(tag == 0xDC ? 2 : 4);
    } else {
      refuse("an array in the metadata", "the msgpack byte " + std::to_string(tag));
    }
    if (count > bytes_.size() - at_) refuse("metadata as long as it says", "a longer array");
    return static_cast<std::size_t>(count);
  }

  // A number of 0 to 2^63 - 1.
  std::uint64_t number() {
    std::uint64_t tag = big(1);
    if (tag < 128) return tag;
    bool is_unsigned = tag >= 0xCC && tag <= 0xCF, is_signed = tag >= 0xD0 && tag <= 0xD3;
    if (!is_unsigned && !is_signed)
      refuse("a number of at least 0 in the metadata", "the msgpack byte " + std::to_string(tag));
    int width = 1 << (tag & 3);
    std::uint64_t value = big(width);
    int top = is_signed ? 8 * width - 1 : 63;  // the sign, or what int64 can't hold
    if (((value >> top) & 1) != 0) refuse("a number from 0 to 2^63 - 1", "another");
    return value;
  }

 private:
  std::uint64_t big(int count) {
    if (static_cast<std::size_t>(count) > bytes_.size() - at_)
      refuse("whole metadata", "its end within a value");
    std::uint64_t value = 0;
    while (count-- > 0) value = (value << 8) | static_cast<unsigned char>(bytes_[at_++]);
    return value;
  }

  std::string_view bytes_;
  std::size_t at_ = 0;
};

void put_word(std::string& out, std::uint32_t word) {
  char bytes[4];
  std::memcpy(bytes, &word, 4);
  out.append(bytes, 4);
}

std::uint32_t word_at(std::string_view bytes, std::size_t index) {
  std::uint32_t word = 0;
  std::memcpy(&word, bytes.data() + 4 * index, 4);
  return word;
}

}  // namespace

std::size_t ArrayType::nbytes() const {
  std::int64_t count = 1;
  for (std::int64_t dim : dims) {
    if (dim < 0 || __builtin_mul_overflow(count, dim, &count) || count > (std::int64_t{1} << 55))
      refuse("an array that fits into memory", "a larger one");
  }
  return storage_bytes(dtype, static_cast<std::size_t>(count));
}

std::optional<std::uint32_t> code_of(DType dtype) noexcept {
  const auto* found = std::find(kDTypes.begin(), kDTypes.end(), dtype);
  if (found == kDTypes.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - kDTypes.begin());
}

std::optional<DType> dtype_of(std::uint64_t code) noexcept {
  if (code >= kDTypes.size()) return std::nullopt;
  return kDTypes[static_cast<std::size_t>(code)];
}

std::string encode_metadata(std::span<const ArrayType> arrays) {
  std::string out;
  put_array(out, arrays.size());
  for (const ArrayType& array : arrays) {
    std::optional<std::uint32_t> code = code_of(array.dtype);
    if (!code)
      refuse(
          "a dtype of int8 to int64, uint8 to uint64, float16 to float64, bfloat16, bool or "
          "complex",
          std::string(name(array.dtype)));
    put_array(out, 2);
    put_number(out, *code);
    put_array(out, array.dims.size());
    for (std::int64_t dim : array.dims) put_number(out, static_cast<std::uint64_t>(dim));
  }
  return out;
}

std::vector<ArrayType> decode_metadata(std::string_view metadata) {
  std::vector<ArrayType> arrays;
  if (metadata.empty()) return arrays;
  Unpacker in(metadata);
  for (std::size_t left = in.array(); left > 0; --left) {
    if (in.array() != 2) refuse("(dtype code, dims) for each array", "another number of values");
    std::uint64_t code = in.number();
    std::optional<DType> dtype = dtype_of(code);
    if (!dtype) refuse("a dtype code of 0 to 14", std::to_string(code));
    ArrayType array{*dtype, std::vector<std::int64_t>(in.array())};
    for (std::int64_t& dim : array.dims) dim = static_cast<std::int64_t>(in.number());
    arrays.push_back(std::move(array));
  }
  if (!in.done()) refuse("metadata as long as the header says", "bytes behind it");
  return arrays;
}

std::string encode_header(std::uint64_t consumer, std::string_view metadata) {
  if (metadata.size() > UINT32_MAX) refuse("less than 4 GiB of metadata", "more");
  Header header{consumer, static_cast<std::uint32_t>(metadata.size())};
  std::string out;
  out.reserve(header.size());
  put_word(out, kStart);
  put_word(out, static_cast<std::uint32_t>(consumer >> 32));
  put_word(out, static_cast<std::uint32_t>(consumer));
  put_word(out, header.metadata_bytes);
  for (std::size_t at = 0; out.size() < header.size(); at += 4) {
    std::uint32_t word = 0;
    for (std::size_t i = at; i < at + 4; ++i)
      word = (word << 8) | (i < metadata.size() ? static_cast<unsigned char>(metadata[i]) : 0U);
    put_word(out, word);
  }
  return out;
}

std::size_t Header::size() const noexcept {
  if (metadata_bytes <= kFirstMetadataBytes) return kBlockBytes;
  std::size_t rest = metadata_bytes - kFirstMetadataBytes;
  return kBlockBytes + (rest + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

Header decode_header(std::string_view block) {
  if (block.size() < kBlockBytes) refuse("a header of 128 bytes", std::to_string(block.size()));
  if (word_at(block, 0) != kStart)
    refuse("a header that begins with 2178", std::to_string(word_at(block, 0)));
  std::uint64_t consumer = (std::uint64_t{word_at(block, 1)} << 32) | word_at(block, 2);
  return {consumer, word_at(block, 3)};
}

std::string metadata_of(const Header& header, std::string_view blocks) {
  if (blocks.size() < header.size()) refuse("a whole header", "a part");
  std::string metadata;
  metadata.reserve(header.metadata_bytes + 3);
  for (std::size_t word = 4; metadata.size() < header.metadata_bytes; ++word)
    put_big(metadata, word_at(blocks, word), 4);
  metadata.resize(header.metadata_bytes);
  return metadata;
}

}  // namespace callgate::outfeed_2020

// -- files ---------------------------------------------------------------------------------------

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
  lock_alone(fd_.get(), "outfeed file '" + path_ + "'");  // where there are no locks, without one
  if (ftruncate(fd_.get(), 0) != 0) fail(path_, "emptying");
}

Outfeed2020Sink::~Outfeed2020Sink() {
  FirstError().survives([&] { close(); });  // nobody is left to tell
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
  append_whole(buffer_, [&] {
    buffer_.append(header);
    for (std::size_t i = 0; i < source.value_leaves; ++i) {
      const LeafType& leaf = source.leaves[i];
      if (leaf.nbytes != 0) buffer_.append(record.data(leaf), leaf.nbytes);
    }
    ends_.push_back(buffer_.size());
  });
  if (buffer_.size() >= kWriteBytes) failure_.survives([&] { write(); });
}

void Outfeed2020Sink::consume(std::span<const Record> records) {
  if (closed_) return;
  auto finish = [&] {
    failure_.survives([&] { write(); });
    failure_.rethrow();
  };
  consume_each(*this, records, [] {}, [&](const Record& record) { add(record); }, finish);
}

// What finds no room is lost, and counted.
void Outfeed2020Sink::write() {
  std::string bytes = std::exchange(buffer_, {});
  const std::vector<std::size_t> ends = std::exchange(ends_, {});
  const Written done = write_at(fd_.get(), size_, bytes);
  if (done.error != 0) {
    // Half a message would stand between this one and the next; those that are whole stay.
    auto lost = std::ranges::upper_bound(ends, done.bytes);
    lose(static_cast<std::uint64_t>(ends.end() - lost));
    if (lost != ends.begin()) size_ += *std::prev(lost);
    [[maybe_unused]] int cut = ftruncate(fd_.get(), static_cast<off_t>(size_));
    errno = done.error;
    fail(path_, "writing");
  }
  size_ += bytes.size();
  bytes.clear();
  buffer_ = std::move(bytes);  // with its memory
}

void Outfeed2020Sink::close() {
  if (std::exchange(closed_, true) || getpid() != process_) return;
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
