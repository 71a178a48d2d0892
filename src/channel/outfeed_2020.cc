// SPDX-License-Identifier: Apache-2.0
// The bytes of an outfeed file, their writer and their reader.
#include "channel/outfeed_2020.h"

#include <algorithm>

namespace callgate::outfeed_2020 {
namespace {

// Removes the first bytes and returns their number.
std::uint64_t take_big(std::string_view& in, std::size_t count) {
  if (count > in.size()) refuse("whole metadata", "its end within a value");
  std::uint64_t value = 0;
  for (char byte : in.substr(0, count)) value = (value << 8) | static_cast<std::uint8_t>(byte);
  in.remove_prefix(count);
  return value;
}

// A number from 0 to 2^63 - 1.
std::uint64_t take_number(std::string_view& in) {
  const std::uint64_t tag = take_big(in, 1);
  if (tag < 128) return tag;
  const bool is_unsigned = tag >= 0xCC && tag <= 0xCF, is_signed = tag >= 0xD0 && tag <= 0xD3;
  if (!is_unsigned && !is_signed)
    refuse("a number of at least 0 in the metadata", "the msgpack byte " + std::to_string(tag));
  const int width = 1 << (tag & 3);
  const std::uint64_t value = take_big(in, static_cast<std::size_t>(width));
  const int top = is_signed ? 8 * width - 1 : 63;  // the sign bit, or values beyond int64
  if (((value >> top) & 1) != 0) refuse("a number from 0 to 2^63 - 1", "another");
  return value;
}

// An array's length. Every element takes at least a byte, so no count exceeds the remaining bytes.
std::size_t take_array(std::string_view& in) {
  const std::uint64_t tag = take_big(in, 1);
  const bool is_short = (tag & 0xF0) == 0x90;
  if (!is_short && tag != 0xDC && tag != 0xDD)
    refuse("an array in the metadata", "the msgpack byte " + std::to_string(tag));
  const std::uint64_t count = is_short ? tag & 0x0F : take_big(in, tag == 0xDC ? 2 : 4);
  if (count > in.size()) refuse("metadata as long as it says", "a longer array");
  return static_cast<std::size_t>(count);
}

}  // namespace

std::size_t ArrayType::nbytes() const {
  std::int64_t count = 1;
  for (std::int64_t dim : dims)
    if (dim < 0 || __builtin_mul_overflow(count, dim, &count) || count > (std::int64_t{1} << 55))
      refuse("an array that fits into memory", "a larger one");
  return storage_bytes(dtype, static_cast<std::size_t>(count));
}

std::optional<std::uint32_t> code_of(DType dtype) noexcept {
  const auto* found = std::ranges::find(kDTypes, dtype);
  if (found == kDTypes.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - kDTypes.begin());
}

void put_tagged(std::string& out, unsigned tag, std::uint64_t value, int exponent) {
  while (exponent < 3 && value >> (8U << exponent) != 0) ++exponent;
  put_big(out, tag + static_cast<unsigned>(exponent), 1);
  put_big(out, value, 1 << exponent);
}

std::string encode_metadata(std::span<const ArrayType> arrays) {
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

std::vector<ArrayType> decode_metadata(std::string_view in) {
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

std::size_t Header::size() const noexcept {
  const std::size_t bytes = kFieldBytes + metadata_bytes;
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

std::string encode_header(std::uint64_t consumer, std::string_view metadata) {
  if (metadata.size() > UINT32_MAX) refuse("less than 4 GiB of metadata", "more");
  const Header header{consumer, static_cast<std::uint32_t>(metadata.size())};
  std::string out(header.size(), '\0');
  const std::array words{kStart, static_cast<std::uint32_t>(consumer >> 32),
                         static_cast<std::uint32_t>(consumer), header.metadata_bytes};
  std::memcpy(out.data(), words.data(), kFieldBytes);
  for (std::size_t i = 0; i < metadata.size(); ++i) out[kFieldBytes + (i ^ 3U)] = metadata[i];
  return out;
}

Header decode_header(std::string_view block) {
  if (block.size() < kBlockBytes) refuse("a header of 128 bytes", std::to_string(block.size()));
  std::array<std::uint32_t, 4> words{};
  std::memcpy(words.data(), block.data(), kFieldBytes);
  if (words[0] != kStart) refuse("a header that begins with 2178", std::to_string(words[0]));
  return {(std::uint64_t{words[1]} << 32) | words[2], words[3]};
}

std::string metadata_of(const Header& header, std::string_view blocks) {
  if (blocks.size() < header.size()) refuse("a whole header", "a part");
  std::string metadata(header.metadata_bytes, '\0');
  for (std::size_t i = 0; i < metadata.size(); ++i) metadata[i] = blocks[kFieldBytes + (i ^ 3U)];
  return metadata;
}

}  // namespace callgate::outfeed_2020

namespace callgate {

Outfeed2020Sink::Outfeed2020Sink(const std::string& path)
    : file_("the outfeed file", path, {.makes_folders = false}) {
  file_.claim();
}

void Outfeed2020Sink::close() {
  if (std::exchange(closed_, true) || !process_.here()) return;
  FirstError errors;
  buffer_ = outfeed_2020::encode_header(0, "");
  errors.survives([&] { write(); });
  errors.survives([&] { file_.close(); });
  errors.rethrow();
}

const std::string& Outfeed2020Sink::header_of(const Source& source) try {
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

void Outfeed2020Sink::take(const Record& record) {
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

void Outfeed2020Sink::write() {
  std::size_t written = 0;
  iovec all{buffer_.data(), buffer_.size()};
  FirstError error;
  if (!error.survives([&] { file_.append({&all, 1}, ends_, written); }))
    lose(ends_.size() - written);
  buffer_.clear();
  ends_.clear();
  error.rethrow();
}

std::optional<Outfeed2020Reader::Message> Outfeed2020Reader::next() try {
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

bool Outfeed2020Reader::read(std::uint64_t offset, std::uint64_t size, std::string& bytes) const {
  const std::uint64_t there = file_.size();
  if (offset > there || size > there - offset) return false;  // before memory is allocated for it
  bytes = file_.read_at(offset, size);
  return bytes.size() == size;
}

}  // namespace callgate
