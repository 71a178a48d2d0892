// SPDX-License-Identifier: Apache-2.0
// The framing in which taps left the device in 2020 (jax.experimental.host_callback's outfeed).
//
// The functions are pure, for any thread; whatever the bytes hold, nothing beyond them is read. The
// sink and the reader of a file in it belong to one thread at a time. A message is a header,
// perhaps continued, and then the arrays' bytes, row-major, one after the other without padding.
// All words are uint32, little-endian in memory:
//
//   header, 32 words:    0      2178
//                        1, 2   consumer id, 64 bits: the high word, then the low word
//                        3      length of the metadata in bytes
//                        4-31   metadata, four bytes a word, the first in the word's highest bits;
//                               zeros behind it
//   continuation,        0-31   the next 128 bytes of the metadata, in the same way; as many blocks
//   32 words each:              as it takes. (In 2020 the metadata ended with the header's words.)
//
// The metadata is msgpack: [(dtype code, [dims, ...]), ...], one entry an array. Codes 0 to 11 are
// int8 to int64, uint8 to uint64, float16, float32, float64 and bfloat16; 12 to 14, of later years,
// are bool, complex64 and complex128. Consumer 0 without arrays marks the end of the stream: its
// metadata is empty here, and may also be an empty msgpack array.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "core/array_view.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate::outfeed_2020 {

inline constexpr std::uint32_t kStart = 2178;
inline constexpr std::size_t kBlockBytes = 128;
inline constexpr std::size_t kFieldBytes = 16;  // of a header, before its metadata
inline constexpr std::array kDTypes{
    // by code
    DType::kS8,  DType::kS16,  DType::kS32,  DType::kS64, DType::kU8,
    DType::kU16, DType::kU32,  DType::kU64,  DType::kF16, DType::kF32,
    DType::kF64, DType::kBF16, DType::kPred, DType::kC64, DType::kC128,
};

[[noreturn]] inline void refuse(const std::string& expected, const std::string& got) {
  throw Error("outfeed of 2020", expected, got);
}

struct ArrayType {
  DType dtype = DType::kInvalid;
  std::vector<std::int64_t> dims;

  // Throws Error when no memory could hold as much.
  std::size_t nbytes() const {
    std::int64_t count = 1;
    for (std::int64_t dim : dims)
      if (dim < 0 || __builtin_mul_overflow(count, dim, &count) || count > (std::int64_t{1} << 55))
        refuse("an array that fits into memory", "a larger one");
    return storage_bytes(dtype, static_cast<std::size_t>(count));
  }
  bool operator==(const ArrayType&) const = default;
};

// None for dtypes that the framing lacks.
inline std::optional<std::uint32_t> code_of(DType dtype) noexcept {
  const auto* found = std::ranges::find(kDTypes, dtype);
  if (found == kDTypes.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - kDTypes.begin());
}
inline std::optional<DType> dtype_of(std::uint64_t code) noexcept {
  return code < kDTypes.size() ? std::optional(kDTypes[code]) : std::nullopt;
}

// The low `count` bytes of a number, the highest first.
inline void put_big(std::string& out, std::uint64_t value, int count) {
  while (count-- > 0) out.push_back(static_cast<char>((value >> (8 * count)) & 255U));
}

// msgpack's tag, the greater the wider the value, and the value.
inline void put_tagged(std::string& out, unsigned tag, std::uint64_t value, int exponent) {
  while (exponent < 3 && value >> (8U << exponent) != 0) ++exponent;
  put_big(out, tag + static_cast<unsigned>(exponent), 1);
  put_big(out, value, 1 << exponent);
}

// The shortest forms, of what is not negative.
inline void put_number(std::string& out, std::uint64_t value) {
  return value < 128 ? put_big(out, value, 1) : put_tagged(out, 0xCC, value, 0);
}
inline void put_array(std::string& out, std::size_t count) {
  return count < 16 ? put_big(out, 0x90 | count, 1) : put_tagged(out, 0xDB, count, 1);
}

// The number in the first bytes, which are taken off.
inline std::uint64_t take_big(std::string_view& in, std::size_t count) {
  if (count > in.size()) refuse("whole metadata", "its end within a value");
  std::uint64_t value = 0;
  for (char byte : in.substr(0, count)) value = (value << 8) | static_cast<std::uint8_t>(byte);
  in.remove_prefix(count);
  return value;
}

// A number of 0 to 2^63 - 1.
inline std::uint64_t take_number(std::string_view& in) {
  const std::uint64_t tag = take_big(in, 1);
  if (tag < 128) return tag;
  const bool is_unsigned = tag >= 0xCC && tag <= 0xCF, is_signed = tag >= 0xD0 && tag <= 0xD3;
  if (!is_unsigned && !is_signed)
    refuse("a number of at least 0 in the metadata", "the msgpack byte " + std::to_string(tag));
  const int width = 1 << (tag & 3);
  const std::uint64_t value = take_big(in, static_cast<std::size_t>(width));
  const int top = is_signed ? 8 * width - 1 : 63;  // the sign, or what int64 can't hold
  if (((value >> top) & 1) != 0) refuse("a number from 0 to 2^63 - 1", "another");
  return value;
}

// An array's length. Every element takes a byte or more, so no count exceeds what is left.
inline std::size_t take_array(std::string_view& in) {
  const std::uint64_t tag = take_big(in, 1);
  const bool is_short = (tag & 0xF0) == 0x90;
  if (!is_short && tag != 0xDC && tag != 0xDD)
    refuse("an array in the metadata", "the msgpack byte " + std::to_string(tag));
  const std::uint64_t count = is_short ? tag & 0x0F : take_big(in, tag == 0xDC ? 2 : 4);
  if (count > in.size()) refuse("metadata as long as it says", "a longer array");
  return static_cast<std::size_t>(count);
}

// Throw Error on a dtype without a code, and on bytes that are no such metadata.
inline std::string encode_metadata(std::span<const ArrayType> arrays) {
  std::string out;
  put_array(out, arrays.size());
  for (const ArrayType& array : arrays) {
    const std::optional<std::uint32_t> code = code_of(array.dtype);
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
inline std::vector<ArrayType> decode_metadata(std::string_view in) {
  std::vector<ArrayType> arrays;
  if (in.empty()) return arrays;
  for (std::size_t left = take_array(in); left > 0; --left) {
    if (take_array(in) != 2)
      refuse("(dtype code, dims) for each array", "another number of values");
    const std::uint64_t code = take_number(in);
    const std::optional<DType> dtype = dtype_of(code);
    if (!dtype) refuse("a dtype code of 0 to 14", std::to_string(code));
    ArrayType array{*dtype, std::vector<std::int64_t>(take_array(in))};
    for (std::int64_t& dim : array.dims) dim = static_cast<std::int64_t>(take_number(in));
    arrays.push_back(std::move(array));
  }
  if (!in.empty()) refuse("metadata as long as the header says", "bytes behind it");
  return arrays;
}

struct Header {
  std::uint64_t consumer = 0;
  std::uint32_t metadata_bytes = 0;

  // Of the header and its continuations.
  std::size_t size() const noexcept {
    const std::size_t bytes = kFieldBytes + metadata_bytes;
    return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  }
};

// The header with its continuations.
inline std::string encode_header(std::uint64_t consumer, std::string_view metadata) {
  if (metadata.size() > UINT32_MAX) refuse("less than 4 GiB of metadata", "more");
  const Header header{consumer, static_cast<std::uint32_t>(metadata.size())};
  std::string out(header.size(), '\0');
  const std::array words{kStart, static_cast<std::uint32_t>(consumer >> 32),
                         static_cast<std::uint32_t>(consumer), header.metadata_bytes};
  std::memcpy(out.data(), words.data(), kFieldBytes);
  for (std::size_t i = 0; i < metadata.size(); ++i) out[kFieldBytes + (i ^ 3U)] = metadata[i];
  return out;
}

// Of the first block, which is at least kBlockBytes. Throws Error when it is no header.
inline Header decode_header(std::string_view block) {
  if (block.size() < kBlockBytes) refuse("a header of 128 bytes", std::to_string(block.size()));
  std::array<std::uint32_t, 4> words{};
  std::memcpy(words.data(), block.data(), kFieldBytes);
  if (words[0] != kStart) refuse("a header that begins with 2178", std::to_string(words[0]));
  return {(std::uint64_t{words[1]} << 32) | words[2], words[3]};
}

// The metadata out of the `header.size()` bytes of the header and its continuations.
inline std::string metadata_of(const Header& header, std::string_view blocks) {
  if (blocks.size() < header.size()) refuse("a whole header", "a part");
  std::string metadata(header.metadata_bytes, '\0');
  for (std::size_t i = 0; i < metadata.size(); ++i) metadata[i] = blocks[kFieldBytes + (i ^ 3U)];
  return metadata;
}

}  // namespace callgate::outfeed_2020

namespace callgate {

// Writes the value leaves of each record as one message of the consumer `source.id`: whole, with
// the axes that vmap added, as taps sent them then. A record none of whose lanes is sent is left
// out, and one with a dtype that the framing lacks refused. close() writes the end marker.
class Outfeed2020Sink final : public Sink {
 public:
  // Makes the file, or empties it. Throws Error naming the path.
  explicit Outfeed2020Sink(const std::string& path)
      : file_("the outfeed file", path, {.makes_folders = false}) {
    file_.claim();
  }
  ~Outfeed2020Sink() override {
    FirstError().survives([&] { close(); });  // nobody is left to tell
  }

  void consume(std::span<const Record> records) override {
    if (!closed_) Sink::consume(records);
  }

  // Writes the end marker and gives the file up; in a fork's child it is the parent's, and stays.
  void close() override {
    if (std::exchange(closed_, true) || !process_.here()) return;
    FirstError errors;
    buffer_ = outfeed_2020::encode_header(0, "");
    errors.survives([&] { write(); });
    errors.survives([&] { file_.close(); });
    errors.rethrow();
  }

  std::string description() const override { return "outfeed of 2020 to " + file_.path(); }

 private:
  const std::string& header_of(const Source& source) try {
    if (auto found = headers_.find(source.id); found != headers_.end()) return found->second;
    std::vector<outfeed_2020::ArrayType> arrays;
    for (const LeafType& leaf : std::span(source.leaves).first(source.value_leaves))
      arrays.push_back({leaf.dtype, leaf.dims});
    const std::string metadata = outfeed_2020::encode_metadata(arrays);
    std::string header = outfeed_2020::encode_header(source.id, metadata);
    return headers_.emplace(source.id, std::move(header)).first->second;
  } catch (const Error& error) {
    throw Error(error.code(), "outfeed file '" + file_.path() + "': the values of '" + source.name +
                                  "' can't be written: " + error.what());
  }

  void take(const Record& record) override {
    const Source& source = *record.source;
    const std::string& header = header_of(source);
    bool sends = !source.has_where;
    if (!sends) RecordViews(source).each_lane(record, [&](auto, auto) { sends = true; });
    if (!sends) return;
    append_whole(buffer_, [&] {
      buffer_.append(header);
      for (const LeafType& leaf : std::span(source.leaves).first(source.value_leaves))
        if (leaf.nbytes != 0) buffer_.append(record.data(leaf), leaf.nbytes);
      ends_.push_back(buffer_.size());
    });
    if (buffer_.size() >= kManyBytes) write_now();
  }

  // What finds no room is lost, and counted.
  void write() override {
    std::size_t written = 0;
    iovec all{buffer_.data(), buffer_.size()};
    FirstError error;
    if (!error.survives([&] { file_.append({&all, 1}, ends_, written); }))
      lose(ends_.size() - written);
    buffer_.clear();
    ends_.clear();
    error.rethrow();
  }

  UnitFile file_;
  std::string buffer_;
  std::vector<std::size_t> ends_;                           // of the messages in it
  std::unordered_map<std::uint64_t, std::string> headers_;  // by Source::id
  bool closed_ = false;
  OfProcess process_;
};

// Reads such a file, which may still be growing.
class Outfeed2020Reader {
 public:
  struct Message {
    std::uint64_t consumer = 0;
    std::vector<outfeed_2020::ArrayType> arrays;
    std::string data;  // the arrays' bytes
    bool end = false;  // the end marker
  };

  // Throws Error naming the path.
  explicit Outfeed2020Reader(std::string path)
      : file_("the outfeed file", std::move(path), {.mode = FileMode::kRead}) {}

  // The next message; none when no whole one follows. Throws Error at what is none.
  std::optional<Message> next() try {
    std::string blocks;
    if (!read(offset_, outfeed_2020::kBlockBytes, blocks)) return std::nullopt;
    const outfeed_2020::Header header = outfeed_2020::decode_header(blocks);
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
    throw Error(error.code(), "outfeed file '" + file_.path() + "', at byte " +
                                  std::to_string(offset_) + ": " + error.what());
  }

  std::uint64_t offset() const noexcept { return offset_; }

 private:
  // `size` bytes from `offset`; false when the file is shorter.
  bool read(std::uint64_t offset, std::uint64_t size, std::string& bytes) const {
    const std::uint64_t there = file_.size();
    if (offset > there || size > there - offset) return false;  // before memory is taken for it
    bytes = file_.read_at(offset, size);
    return bytes.size() == size;
  }

  File file_;
  std::uint64_t offset_ = 0;
};

}  // namespace callgate
